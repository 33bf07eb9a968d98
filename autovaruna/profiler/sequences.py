"""Records what a part takes of the heap and gives back, one after the other, forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from autovaruna.profiler.allocations import AllocationMeter, is_profiled
from autovaruna.profiler.records import NOT_RECORDED, Sequences
from autovaruna.profiler.work import Work

logger = logging.getLogger(__name__)


def record_sequences(work: Work, device: torch.device) -> Sequences:
    """Runs `work`, which has run before, once more, and records; what it makes and its gradients stay until the end.

    Nothing is recorded where the heap of the C library plays no part, or cannot be looked at; nor of what goes backward
    in an ordinary call alone, as a reentrant checkpoint in a module that is kept whole.
    """
    if device.type != "cpu" or is_profiled():
        return NOT_RECORDED
    try:
        return _record(work)
    except RuntimeError as error:
        logger.debug("not recorded: %s", error)
        return NOT_RECORDED


def _record(work: Work) -> Sequences:
    taken = _Taken()
    others = [work.forward()] if work.is_cast else []  # what autocast keeps of weights is there once for all runs
    with AllocationMeter() as meter:
        outputs = work.forward()
        meter.restart()
        forward = taken.numbered(meter.events)
        held = work.gradients_of_arguments(outputs) if work.needs_gradient else ()
        meter.restart()
        backward = taken.numbered(meter.events)
        del held
    others.clear()  # not before the meter ends, which has not seen it come
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
