"""Defines what a value of a graph may have to do with the batch, and marks the values that are of all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, Flag, IntEnum, auto
from typing import Any

import torch
from torch import Tensor, fx


class Source(Flag):
    """What a value is made of."""

    NONE = 0
    SAMPLES = auto()
    """Numbers of samples."""
    TOTAL = auto()
    """What `of_batch` gives of them."""
    BATCH = auto()
    """Numbers of samples, a total, or the size of the batch."""
    STATE = auto()
    """Parameters and buffers."""


class Reach(IntEnum):
    """How far the numbers of a value reach over the batch."""

    NONE = 0
    """They do not depend on it."""
    COUNTS = 1
    """Integers or masks, or what was counted from them."""
    COUNTS_OF_SEVERAL = 2
    """Those that were made of several samples' integers or masks."""
    SAMPLES = 3
    """Numbers of the samples, each in a place of its own."""
    ALL = 4
    """Numbers of several samples in one, or of one for all."""


class Share(IntEnum):
    """What a value that follows from the inputs alone has to do with the batch."""

    FIXED = 0
    """Nothing, or it follows from its size."""
    WHOLE = 1
    """It is a total, or made of totals."""
    SAMPLES = 2
    """It has numbers of samples, or cannot be merged."""
    AFTER = 3
    """It joins the two."""


class Merge(str, Enum):
    """How the totals of several mini-batches become that of all."""

    SUM = "sum"
    MEAN = "mean"
    LARGEST = "largest"
    SMALLEST = "smallest"


@dataclass(frozen=True)
class Value:
    """What is known of the value of a node.

    Attributes:
        reach: how far it reaches over the batch.
        share: what it has to do with the batch if it follows from the inputs alone; None: it does not.
        merge: how it is merged if it is a total.
        is_extreme: whether it is the greatest or the least of the batch, or follows from such values alone.
    """

    source: Source = Source.NONE
    reach: Reach = Reach.NONE
    share: Share | None = None
    merge: Merge | None = None
    is_extreme: bool = False


class Use(str, Enum):
    """What becomes of a value of the whole batch in the term of a loss."""

    PLAIN = "plain"
    """It is used as it is."""
    DIVISOR = "divisor"
    """It divides a sum over the samples of a micro-batch: the quotients are averaged, so it is given in proportion."""
    FACTOR = "factor"
    """It multiplies such a sum."""

    def of_share(self, value: Tensor | float, share: float) -> Tensor | float:
        """Returns what a micro-batch gets, whose loss has the weight `share` in that of the global batch."""
        if self is Use.PLAIN:
            return value
        wide = value.double() if isinstance(value, Tensor) else value
        return wide * share if self is Use.DIVISOR else wide / share


def of_batch(value: Any, use: Use, dtype: torch.dtype) -> Tensor:
    """Stands in a graph for `value` over the whole batch; run by itself, what it is given is the whole batch."""
    return value.to(dtype) if isinstance(value, Tensor) else torch.scalar_tensor(value, dtype=dtype)


def as_tensor(number: Any, dtype: torch.dtype) -> Tensor:
    """Returns a number as a tensor."""
    return torch.scalar_tensor(number, dtype=dtype)


def reached(starts: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """Yields nodes and what follows from each by a function, in any direction of the graph; each node once."""
    waiting = list(dict.fromkeys(starts))
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = [each for each in dict.fromkeys(following(node)) if each not in seen]
        seen.update(new)
        waiting += new


def is_of_batch(node: fx.Node) -> bool:
    """Whether a node of a graph stands for a value of the whole batch."""
    return node.target is of_batch


def count_by_class(target: Tensor, ignored: int, num_classes: int) -> Tensor:
    """Returns how often each class is among labels, shape ``(num_classes,)``; those that are ignored are left out."""
    is_counted = target.ne(ignored).reshape(-1)
    classes = target.reshape(-1) * is_counted
    return classes.new_zeros(num_classes).index_add(0, classes, is_counted.to(classes.dtype))
