"""Defines `Copies`: a wrapped model and its deep copies, all of which are split in the same way at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from autovaruna.errors import RankError
from autovaruna.parallel.preparation import Preparation
from autovaruna.runtime.worlds.world import World

if TYPE_CHECKING:
    from autovaruna.parallel.splittable import SplittableModule


class Copies:
    """The models that stay alike in what each rank holds of them: averages of weights, teachers, target networks.

    Attributes:
        preparation: their common plan; None before the first call of any of them.
        num_made: how many there have been.
    """

    def __init__(self) -> None:
        self.preparation: Preparation | None = None
        self.num_made = 0
        self._members: list[ref[SplittableModule]] = []

    def add(self, model: SplittableModule) -> int:
        """Takes a model in; returns its number."""
        self._members.append(ref(model))
        self.num_made += 1
        return self.num_made - 1

    def members(self) -> list[SplittableModule]:
        """Returns those that there still are, the first one first."""
        return [model for each in self._members if (model := each()) is not None]

    def compare(self, world: World) -> None:
        """Makes sure that all ranks have made the same copies. Collective.

        Raises:
            RankError: they have not.
        """
        numbers = world.gather_objects(len(self.members()), "counting copies of the model")
        if len(set(numbers)) > 1:
            raise RankError(
                f"The ranks have {numbers} models that are copies of one another, to be split together. Expected "
                "copy.deepcopy(model) on every rank, or on none."
            )
