"""Records what a part takes of the heap and gives back, one after the other, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autovaruna.profiler.allocations import AllocationMeter, is_profiled
from autovaruna.profiler.records import NOT_RECORDED, Sequences
from autovaruna.profiler.work import Work


def record_sequences(work: Work, device: torch.device) -> Sequences:
    """Runs `work`, which has run before, once more, and records; what it makes and its gradients stay until the end.

    Nothing is recorded where the heap of the C library plays no part, or cannot be looked at.
    """
    if device.type != "cpu" or is_profiled():
        return NOT_RECORDED
    taken = _Taken()
    with AllocationMeter() as meter:
        outputs = work.forward()
        meter.restart()
        forward = taken.numbered(meter.events)
        held = work.gradients_of_arguments(outputs) if work.needs_gradient else ()
        meter.restart()
        backward = taken.numbered(meter.events)
        del held
    return Sequences(forward, backward)


class _Taken:
    """Numbers what is taken, by its address."""

    def __init__(self) -> None:
        self._num_taken = 0
        self._numbers: dict[int, int] = {}

    def numbered(self, events: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """Returns events as `Sequences` have them; what was there before is left out."""
        found = []
        for num_bytes, address in events:
            if num_bytes > 0:
                self._num_taken += 1
                self._numbers[address] = self._num_taken
                found.append(num_bytes)
            elif address in self._numbers:
                found.append(-self._numbers.pop(address))
        return tuple(found)
