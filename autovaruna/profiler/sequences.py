"""Records what a part takes of the heap and gives back, one after the other, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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
    with _gradients_apart(work) as held, AllocationMeter() as meter:
        outputs = work.forward()
        meter.restart()
        forward = taken.numbered(meter.events)
        if work.needs_gradient:
            work.backward(outputs)
        meter.restart()
        backward = taken.numbered(meter.events)
        held.clear()
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


@contextmanager
def _gradients_apart(work: Work) -> Iterator[list[Tensor]]:
    """Lets every gradient be made anew, and keeps it in the list; then puts back those that were there."""
    leaves = [each for each in work.arguments if isinstance(each, Tensor) and each.requires_grad]
    before = [leaf.grad for leaf in leaves]
    made: list[Tensor] = []

    def keep(leaf: Tensor) -> None:
        assert leaf.grad is not None
        made.append(leaf.grad)

    hooks = [leaf.register_post_accumulate_grad_hook(keep) for leaf in leaves]  # type: ignore[no-untyped-call]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield made
    finally:
        for leaf, gradient, hook in zip(leaves, before, hooks, strict=True):
            leaf.grad = gradient
            hook.remove()
