"""Knows the models of the program that are split over the ranks, and finds the one that a tensor is of."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn

from autovaruna.runtime.weights.elsewhere import PLAIN
from autovaruna.runtime.weights.placement import OwnedState, Placement
from autovaruna.runtime.worlds.world import World


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A model of which this rank has a part.

    Attributes:
        known_state: Its parameters, as long as the model is there.
        placement: Who holds them.
        world: The ranks.
        limits: What this rank has clipped its gradients to the last time; empty: it has not.
    """

    known_state: ReferenceType[OwnedState]
    placement: Placement
    world: World
    limits: list[float] = field(default_factory=list)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by first name."""
        state = self.known_state()
        return {} if state is None else state.parameters()

    def names(self) -> dict[int, str]:
        """Returns the first name of each parameter, by identity."""
        return {id(each): name for name, each in self.parameters().items()}

    def names_of_gradients(self) -> dict[int, str]:
        """Returns the first name of each parameter that has a gradient, by identity of the gradient."""
        with PLAIN():  # many may be elsewhere
            gradients = {name: each.grad for name, each in self.parameters().items()}
        return {id(each): name for name, each in gradients.items() if each is not None}


_models: WeakKeyDictionary[OwnedState, SplitModel] = WeakKeyDictionary()


def note_split(state: OwnedState, placement: Placement, world: World) -> None:
    """Takes a model in, for as long as its state is there."""
    _models[state] = SplitModel(ref(state), placement, world)


def split_models() -> list[SplitModel]:
    """Returns the models that are split."""
    return list(_models.values())
