"""Counts the bytes of one forward and backward: what is saved for backward, and what is needed while they run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.multiprocessing.reductions import StorageWeakRef

from autovaruna._torch import FakeTensor, TorchDispatchMode, is_profiler_enabled, pytree, storage_of
from autovaruna.config.files import Whole
from autovaruna.profiler.work import Work

_alone = Lock()  # the profiler is one for the process


class AllocationMeter:
    """Finds the most memory that this thread has allocated and not yet freed while its context runs."""

    def __enter__(self) -> AllocationMeter:
        _alone.acquire()
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
        for num_bytes, address in _allocations(self._profile):
            if num_bytes > 0:
                self._live[address] = num_bytes
                now += num_bytes
                peak = max(peak, now)
            else:
                now -= self._live.pop(address, 0)
        return peak


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
    is_ours = "KINETO_LOG_LEVEL" not in os.environ
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if is_ours:
            del os.environ["KINETO_LOG_LEVEL"]


@dataclass(frozen=True)
class Made:
    """Memory that was made inside and goes out: its first output's place, and whether the part itself saves it."""

    place: Whole
    num_bytes: Whole
    is_saved: bool


@dataclass(frozen=True)
class Bytes:
    """What one run of a part keeps and needs.

    Attributes:
        inside: saved memory that neither came in nor goes out.
        saved_values: place among the part's values, and bytes, of each one that is saved.
        forward_work, work: the most that forward and backward need beside what is saved and goes out.
    """

    inside: Whole
    saved_values: tuple[tuple[Whole, Whole], ...]
    made: tuple[Made, ...]
    forward_work: Whole
    work: Whole


def count_bytes(work: Work, device: torch.device) -> Bytes:
    """Runs `work` once, forward and backward, and counts."""
    arguments = {storage_of(tensor): tensor for tensor in work.arguments if isinstance(tensor, Tensor)}
    arguments |= _casts(work)
    meter = meter_of(device, arguments.values())
    with _transient_gradients(work), meter:
        outputs, saved = _run(work)
        made: dict[int, Made] = {}
        for place, output in enumerate(outputs):
            storage = storage_of(output)
            if storage not in arguments:
                made.setdefault(storage, Made(place, _num_bytes(output), storage in saved))
        inside = sum(_num_bytes(saved[key]) for key in saved.keys() - arguments.keys() - made.keys())
        values = tuple((k, _num_bytes(value)) for k, value in enumerate(work.values) if storage_of(value) in saved)
        saved.clear()
        kept = inside + sum(each.num_bytes for each in made.values())
        forward_work = max(0, meter.restart() - kept)
        if work.needs_gradient:
            work.backward(outputs)
        return Bytes(inside, values, tuple(made.values()), forward_work, max(0, meter.restart() - kept))


def _run(work: Work) -> tuple[Sequence[Tensor], dict[int, Tensor]]:
    """Runs forward and returns its outputs, and what is saved for backward by memory."""
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept = saved[storage_of(tensor)] = tensor.detach()
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return work.forward(), saved


def _casts(work: Work) -> dict[int, Tensor]:
    """Returns the copies of weights that autocast keeps: what two runs, both alive, save of the same memory."""
    if not work.is_cast:
        return {}
    first, second = (_run(work)[1] for _ in range(2))
    return {storage: tensor for storage, tensor in first.items() if storage in second}


@contextmanager
def _transient_gradients(work: Work) -> Iterator[None]:
    """Frees each parameter's gradient once it is there: a step adds it to memory that the planner counts."""
    values = {id(value) for value in work.values}
    leaves = [
        each for each in work.arguments if isinstance(each, Tensor) and each.requires_grad and id(each) not in values
    ]
    gradients = [leaf.grad for leaf in leaves]

    def forget(leaf: Tensor) -> None:
        leaf.grad = None

    hooks = [leaf.register_post_accumulate_grad_hook(forget) for leaf in leaves]  # type: ignore[no-untyped-call]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient, hook in zip(leaves, gradients, hooks, strict=True):
            leaf.grad = gradient
            hook.remove()


def meter_of(device: torch.device, known: Iterable[Tensor]) -> AllocationMeter | _OperationMeter | _AllocatorMeter:
    """Returns a meter of memory on a device; that of `known` was there before."""
    if device.type == "cuda":
        return _AllocatorMeter(device)
    tensors = tuple(known)
    if any(isinstance(tensor, FakeTensor) for tensor in tensors) or is_profiler_enabled():  # there is one at a time
        return _OperationMeter({storage_of(tensor) for tensor in tensors})
    return AllocationMeter()


class _OperationMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the results of operations, each from its first sight until the last tensor on its memory is gone."""

    def __init__(self, known: Set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.live: dict[int, tuple[Callable[[], bool], int]] = {}
        self._peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and storage_of(tensor) not in self.known:
                self.live[storage_of(tensor)] = (_gone(tensor), _num_bytes(tensor))
        self._peak_bytes = max(self._peak_bytes, self._live_bytes())
        return result

    def restart(self) -> int:
        """Returns the most there has been, in bytes, and counts from what is there now."""
        peak, self._peak_bytes = self._peak_bytes, self._live_bytes()
        return peak

    def _live_bytes(self) -> int:
        self.live = {storage: entry for storage, entry in self.live.items() if not entry[0]()}
        return sum(num_bytes for _, num_bytes in self.live.values())


def _gone(tensor: Tensor) -> Callable[[], bool]:
    """Returns what says whether a tensor's memory is free."""
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    gone: Callable[[], bool] = reference.expired
    return gone


class _AllocatorMeter:
    """Asks the device's allocator, which also sees what an operation needs for itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> _AllocatorMeter:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.before = int(torch.cuda.memory_allocated(self.device))
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the allocator as it is."""

    def restart(self) -> int:
        """Returns the most there has been, in bytes, and counts from what is there now."""
        peak = int(torch.cuda.max_memory_allocated(self.device)) - self.before
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


def _num_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
