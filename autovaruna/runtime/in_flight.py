"""Defines `InFlight`: a micro-batch at a stage, between its forward and its backward."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autovaruna.graph.pieces.weight_gradients import Deferred
from autovaruna.runtime.offload import Stash

NOTHING: Mapping[str, Tensor] = {}


class InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward.

    Args:
        tensors: What it has received.

    Attributes:
        tensors: the same, until the forward has ended.
        returned: what the forward returned, with its graph.
        gradients: those of what it has received.
        before: state that the forward found and changed.
        stash: what it has received, if it runs forward again.
        deferred: weight gradients that the backward leaves for later.
    """

    __slots__ = ("before", "deferred", "gradients", "returned", "stash", "tensors")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.returned = NOTHING
        self.gradients: dict[str, Tensor] = {}
        self.before = NOTHING
        self.stash: Stash | None = None
        self.deferred: Deferred | None = None
