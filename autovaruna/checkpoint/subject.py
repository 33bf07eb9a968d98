"""Defines `Subject`: what a checkpoint is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autovaruna.runtime.optimizers.optimizer import CutOptimizer
from autovaruna.runtime.weights.placement import OwnedState, Placement
from autovaruna.runtime.worlds.world import World


@dataclass(frozen=True)
class Subject:
    """A model in training, as this rank sees it.

    Attributes:
        world: the ranks.
        state: the model's parameters and buffers.
        placement: who holds which; None while every rank has the whole model as it built it.
        optimizer: its optimizer.
        seed: what random nodes are seeded from; None: not known yet.
        num_calls: calls of the model so far.
    """

    world: World
    state: OwnedState
    placement: Placement | None = None
    optimizer: CutOptimizer | None = None
    seed: int | None = None
    num_calls: int = 0

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.state.model

    def entries(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the model's ``state_dict``: its tensors, and what modules add of their own.

        Tensors that this rank does not hold are on ``meta``.
        """
        tensors: dict[str, Tensor] = {}
        others: dict[str, Any] = {}
        for name, value in self.model.state_dict().items():
            (tensors if name in self.state.first_name else others)[name] = value
        return tensors, others

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors among the `entries`."""
        return self.entries()[0]

    def first_names(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Returns the first name, among those of the given `tensors()`, of each that is saved.

        Tied tensors are saved once. A name that the library transformers ties to another is not the one.
        """
        tied_by_hand = getattr(self.model, "_tied_weights_keys", None) or ()
        names = sorted(tensors, key=lambda name: name in tied_by_hand)  # keeps the order otherwise
        chosen: dict[str, str] = {}
        for name in names:
            chosen.setdefault(self.state.first_name[name], name)
        return {name: chosen[self.state.first_name[name]] for name in tensors}


def is_parameter(subject: Subject, name: str) -> bool:
    """Says whether a name is that of a parameter; else it is a buffer."""
    return isinstance(subject.state.tensor(subject.state.first_name[name]), nn.Parameter)


def writers(subject: Subject, tensors: Mapping[str, Tensor], is_shared: bool) -> dict[str, int]:
    """Returns the rank that writes each tensor that is saved; the same on every rank.

    Args:
        subject: The model.
        tensors: Its `tensors()`.
        is_shared: Whether the replicas of a parameter's stage divide its stage's parameters among them by bytes, or
            the first of them writes all. Buffers are always those of the first.
    """
    if subject.placement is None:
        return dict.fromkeys(subject.first_names(tensors).values(), 0)
    load = [0] * subject.world.num_ranks
    found: dict[str, int] = {}
    sizes = {name: num_bytes(tensors[name]) for name in subject.first_names(tensors).values()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        holders = subject.placement.ranks_of(subject.state.first_name[name])
        is_divided = is_shared and is_parameter(subject, name)
        writer = min(holders, key=lambda rank: (load[rank], rank)) if is_divided else holders[0]
        found[name] = writer
        load[writer] += sizes[name]
    return found


def num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's numbers."""
    return tensor.shape.numel() * tensor.dtype.itemsize  # what a tensor says that is elsewhere, too
