"""Defines `Subject`: what a checkpoint is of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autovaruna.runtime.optimizer import CutOptimizer
from autovaruna.runtime.placement import OwnedState, Placement
from autovaruna.runtime.world import World


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

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of the model's ``state_dict``, on ``meta`` where this rank does not hold them."""
        entries = self.model.state_dict()
        return {name: entries[name] for name in entries if name in self.state.first_name}

    def other_state(self) -> dict[str, Any]:
        """Returns what else is in the model's ``state_dict``: what modules add of their own."""
        entries = self.model.state_dict()
        return {name: entries[name] for name in entries if name not in self.state.first_name}

    def first_names(self) -> dict[str, str]:
        """Returns the first name, among those in the ``state_dict``, of each tensor that is saved.

        Tied tensors are saved once. A name that the library transformers ties to another is not the one.
        """
        tied_by_hand = getattr(self.model, "_tied_weights_keys", None) or ()
        names = sorted(self.tensors(), key=lambda name: name in tied_by_hand)  # keeps the order otherwise
        chosen: dict[str, str] = {}
        for name in names:
            chosen.setdefault(self.state.first_name[name], name)
        return {name: chosen[self.state.first_name[name]] for name in self.tensors()}


def is_parameter(subject: Subject, name: str) -> bool:
    """Says whether a name is that of a parameter; else it is a buffer."""
    return isinstance(subject.state.tensor(subject.state.first_name[name]), nn.Parameter)


def writers(subject: Subject, is_shared: bool) -> dict[str, int]:
    """Returns the rank that writes each tensor that is saved; the same on every rank.

    Args:
        subject: The model.
        is_shared: Whether the replicas of a parameter's stage divide its stage's parameters among them by bytes, or
            the first of them writes all. Buffers are always those of the first.
    """
    if subject.placement is None:
        return dict.fromkeys(subject.first_names().values(), 0)
    tensors = subject.tensors()
    load = [0] * subject.world.num_ranks
    found: dict[str, int] = {}
    names = sorted(set(subject.first_names().values()), key=lambda name: (-num_bytes(tensors[name]), name))
    for name in names:
        holders = subject.placement.ranks_of(subject.state.first_name[name])
        is_divided = is_shared and is_parameter(subject, name)
        writer = min(holders, key=lambda rank: (load[rank], rank)) if is_divided else holders[0]
        found[name] = writer
        load[writer] += num_bytes(tensors[name])
    return found


def num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's numbers."""
    return tensor.numel() * tensor.element_size()
