"""Finds which buffers of a module that is kept whole change alike whatever its samples are: it is tried out.

Plain PyTorch changes such state, the vectors of a spectral normalisation or a counter, once a call; what follows from
samples, or from chance, changes once a micro-batch. A counter that tells how often an average was changed goes with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autovaruna.graph.kept_whole.drawn_arguments import Numbers, drawn_arguments
from autovaruna.graph.kept_whole.trial import Trial
from autovaruna.graph.random import default_generator

_SIZE, _OTHER_SIZE = 5, 3

Changed = Mapping[int, Tensor]
"""Numbers that a run has changed of the state, by place."""


def changed_once(trial: Trial, num_parameters: int) -> frozenset[int]:
    """Returns the places of the buffers, in the module's state, that change alike in all micro-batches, or never.

    Args:
        trial: What the module is tried out with.
        num_parameters: How many of the tensors of its state are parameters; buffers follow them.
    """
    buffers = frozenset(range(num_parameters, len(trial.state)))
    if not buffers:
        return buffers
    for numbers in (Numbers.DRAWN, Numbers.SHARES):
        try:
            return _alike(trial, buffers, numbers)
        except Exception:  # it may want other numbers
            continue
    return frozenset()


@dataclass(frozen=True)
class _Left:
    """What a run returns, and what it leaves."""

    outputs: Sequence[Tensor]
    changed: Changed

    def agrees(self, other: _Left, place: int) -> bool:
        """Whether another run has left the same in a place."""
        if place not in self.changed or place not in other.changed:
            return place not in self.changed and place not in other.changed
        return torch.equal(self.changed[place], other.changed[place])


def _alike(trial: Trial, buffers: frozenset[int], numbers: Numbers) -> frozenset[int]:
    given = drawn_arguments(trial, numbers, _SIZE)
    first = _run(trial, given, seed=0)
    others = [
        _run(trial, drawn_arguments(trial, numbers, _OTHER_SIZE, seed=1, is_far=True), seed=1),
        _run(trial, drawn_arguments(trial, Numbers.PLAIN, _SIZE, seed=2), seed=2),
    ]
    alike = frozenset(place for place in buffers if all(first.agrees(other, place) for other in others))
    return frozenset() if _go_together(trial, given, first, alike) else alike


def _go_together(trial: Trial, given: Sequence[Tensor], first: _Left, alike: frozenset[int]) -> bool:
    """Whether what changes alike and the rest, both as a run has left them, decide something together.

    Either what becomes of the other, or both of them what the module returns.
    """
    steps = [
        {place: each for place, each in first.changed.items() if (place in alike) == is_alike}
        for is_alike in (True, False)
    ]
    if not all(steps):
        return False
    later = [_run(trial, given, seed=0, replaced=step) for step in steps]
    is_decided = any(
        not first.agrees(run, place) for run, step in zip(later, reversed(steps), strict=True) for place in step
    )
    return is_decided or not any(_are_equal(run.outputs, first.outputs) for run in later)


def _run(trial: Trial, given: Sequence[Tensor], seed: int, replaced: Changed | None = None) -> _Left:
    """Runs the module from its own state, other numbers in place of some."""
    default_generator(trial.device).manual_seed(seed)
    copies = [each.detach().clone().requires_grad_(each.requires_grad) for each in given]
    state = trial.numbers()
    for place, number in (replaced or {}).items():
        state[place] = number.clone()
    outputs, _, changed = trial.run(copies, state, seed)
    return _Left(outputs, changed)


def _are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(each, same) for each, same in zip(one, other, strict=True))
