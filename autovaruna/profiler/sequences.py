"""Records what a part takes of the heap and gives back, one after the other, forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

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
        held = work.gradients_of_values(outputs) if work.needs_gradient else ()
        meter.restart()
        backward = taken.numbered(meter.events)
        places = _come_in(work, outputs) | taken.places
        own = held[: len(work.values)]
        read = tuple(0 if each is None else places.get(_address(each), 0) for each in own)
        spans = tuple(0 if each is None else _span_with_holes(each) for each in own)
        del held, own
    others.clear()  # not before the meter ends, which has not seen it come
    return Sequences(forward, backward, read, spans)


def _come_in(work: Work, outputs: Sequence[Tensor]) -> dict[int, int]:
    """Returns where the gradients that come in lie: less than zero, the place of the output, counted from 1."""
    places = (place for place, output in enumerate(outputs, 1) if output.requires_grad)
    return {_address(gradient): -place for place, gradient in zip(places, work.gradients, strict=True)}


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span_with_holes(tensor: Tensor) -> int:
    """Returns the bytes from the first to the last element, 0 if there is nothing else between them."""
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((length - 1) * stride for length, stride in lengths)
    return span * tensor.element_size() if span > tensor.numel() > 0 else 0


class _Taken:
    """Numbers what is taken, by its address; `places` are those of what is there."""

    def __init__(self) -> None:
        self._num_taken = 0
        self.places: dict[int, int] = {}

    def numbered(self, events: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """Returns events as `Sequences` have them; what was there before is left out."""
        found = []
        for num_bytes, address in events:
            if num_bytes > 0:
                self._num_taken += 1
                self.places[address] = self._num_taken
                found.append(num_bytes)
            elif address in self.places:
                found.append(-self.places.pop(address))
        return tuple(found)
