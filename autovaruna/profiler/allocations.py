"""Follows what is allocated on the CPU, as torch's own profiler sees it: also what kernels take for themselves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch.autograd.profiler import profile

from autovaruna._torch import is_profiler_enabled

_QUIET = "KINETO_LOG_LEVEL", "99"
_alone = Lock()
"""The profiler is one for the process."""


class AllocationMeter:
    """Finds the most memory that this thread has allocated and not yet freed while its context runs.

    Attributes:
        events: the bytes of each allocation up to the last `restart`, less than 0 where it is freed, and its address.
    """

    def __enter__(self) -> AllocationMeter:
        _alone.acquire()
        self.events: list[tuple[int, int]] = []
        self._live: dict[int, int] = {}
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._stop()
        finally:
            _alone.release()

    def restart(self) -> int:
        """Returns the most there has been, in bytes, and counts from what is there now."""
        peak = self._stop()
        self._start()
        return peak

    def _start(self) -> None:
        self._profile = profile(profile_memory=True)
        with _quiet():
            self._profile.__enter__()  # type: ignore[no-untyped-call]

    def _stop(self) -> int:
        with _quiet():
            self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        now = peak = sum(self._live.values())
        self.events = _allocations(self._profile)
        for num_bytes, address in self.events:
            if num_bytes > 0:
                self._live[address] = num_bytes
                now += num_bytes
                peak = max(peak, now)
            else:
                now -= self._live.pop(address, 0)
        return peak


def is_profiled() -> bool:
    """Returns whether the script runs the profiler, of which there is one at a time."""
    return bool(is_profiler_enabled())


def _allocations(done: profile) -> list[tuple[int, int]]:
    """Returns the bytes of each allocation, less than 0 where it is freed, and its address, in order."""
    assert done.kineto_results is not None
    found = [
        (event.start_time_ns, order, int(event.extra_fields.alloc_size), int(event.extra_fields.ptr))
        for order, event in enumerate(_events(done.kineto_results.experimental_event_tree()))
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu"
    ]
    return [(num_bytes, address) for _, _, num_bytes, address in sorted(found)]


def _events(tree: Iterable[Any]) -> Iterator[Any]:
    for event in tree:
        yield event
        yield from _events(event.children)


@contextmanager
def _quiet() -> Iterator[None]:
    """Lets the profiler start without a line on the terminal."""
    name, value = _QUIET
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
