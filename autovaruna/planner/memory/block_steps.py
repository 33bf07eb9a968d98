"""Defines `BlockSteps`: what a block takes of the heap and gives back, and which of that is what.

What was recorded has bytes alone. Values and gradients are told by these: of what is left at the end, the first of the
same size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autovaruna.profiler.records import Sequences


@dataclass(frozen=True, slots=True)
class BlockSteps:
    """What a block takes and gives back, in order; `Sequences` says how, and how they are numbered.

    Attributes:
        forward, backward: the steps.
        made: the number of each value that forward makes; one that is not there lies in what is left, or in no other.
        read: the number of what each gradient of a value that it reads lies in; several may lie in one.
        passed: values whose gradients lie in that of a value that it makes, and which one that is.
        spans: bytes from the first to the last element of gradients that have holes.
        weights: the numbers of the gradients of its parameters.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    made: dict[int, int]
    read: dict[int, int]
    weights: tuple[int, ...]
    passed: dict[int, int] = field(default_factory=dict)
    spans: dict[int, float] = field(default_factory=dict)


def steps_of_block(
    sequences: Sequences, made: Mapping[int, float], read: Mapping[int, float], weights: Iterable[float]
) -> BlockSteps | None:
    """Returns the steps of a block; None where nothing was recorded.

    Args:
        sequences: what was recorded.
        made: bytes of the values that it makes, by their place in the graph.
        read: the same of those that it reads and whose gradients it makes.
        weights: bytes of the gradients of its parameters.
    """
    if not (sequences.forward or sequences.backward):
        return None
    left = _left(sequences.forward, {})
    num_taken = sum(step > 0 for step in sequences.forward)
    after = {number: size for number, size in _left(sequences.backward, left, num_taken).items() if number > num_taken}
    known = dict(zip(read, sequences.read, strict=False))
    own = {v: number for v, number in known.items() if number > 0}
    passed = {v: list(made)[-1 - number] for v, number in known.items() if number < 0}
    for number in own.values():
        after.pop(number, None)
    trained = _match(dict(enumerate(weights)), after)
    others = _match({v: num_bytes for v, num_bytes in read.items() if not known.get(v)}, after)
    spans = {v: float(span) for v, span in zip(read, sequences.spans, strict=False) if span}
    return BlockSteps(
        sequences.forward, sequences.backward, _match(made, left), own | others, tuple(trained.values()), passed, spans
    )


def _left(steps: Iterable[int], before: Mapping[int, int], num_taken: int = 0) -> dict[int, int]:
    """Returns what is left in the end: bytes by number."""
    left = dict(before)
    for step in steps:
        if step > 0:
            num_taken += 1
            left[num_taken] = step
        else:
            left.pop(-step, None)
    return left


def _match(wanted: Mapping[int, float], left: dict[int, int]) -> dict[int, int]:
    """Returns the number of what is wanted by its bytes, as far as it is there; takes it out of what is left."""
    found = {}
    for key, num_bytes in wanted.items():
        number = next((number for number, size in left.items() if abs(size - num_bytes) <= _NEARLY * num_bytes), None)
        if number is not None:
            found[key] = number
            del left[number]
    return found


_NEARLY = 0.02
"""Sizes of values are exact, recorded ones may be interpolated."""
