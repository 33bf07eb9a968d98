"""Takes the gradients of a step from the stages, and keeps back those that are not to be summed yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from autovaruna.runtime.gradient_sums.gradients import GradientSum, Summation
from autovaruna.runtime.worlds.world import World
from autovaruna.stage.module import ParameterUse, StageModule


class GradientBook:
    """Takes gradients from the leaves of a graph's stages, and keeps back what is not to be summed yet.

    Args:
        total: Sums over ranks.
        stages: This rank's stages.
        world: The ranks' way to talk.
    """

    def __init__(self, total: GradientSum, stages: Sequence[StageModule], world: World) -> None:
        self._sum = total
        self._stages = stages
        self._world = world
        self._kept: dict[ParameterUse, Tensor] = {}
        self._may_have_kept = False
        self._early: Summation | None = None

    def begin(self, origin: str) -> Callable[[int], None]:
        """Begins a step whose gradients will be summed; returns what hears of each stage that has ended."""
        self._early = self._sum.begin(origin)
        return self._end_stage if self._early is not None else lambda stage: None

    def _end_stage(self, stage: int) -> None:
        assert self._early is not None, "only a step that has begun may end a stage"
        self._early.end_stage(stage, _taken([each for each in self._stages if each.index == stage]))

    def keeps_back(self) -> None:
        """Notes that gradients of this step will be kept back; every rank of the step does."""
        self._may_have_kept = True

    def take(self) -> dict[ParameterUse, Tensor]:
        """Takes the gradients of the last step away from the leaves, by use."""
        return _taken(self._stages)

    def keep(self, accumulators: Mapping[ParameterUse, Tensor]) -> None:
        """Keeps gradients of this rank back until the next `take_kept`."""
        for use, gradient in accumulators.items():
            self._kept[use] = self._kept[use].add_(gradient) if use in self._kept else gradient

    def total(self, accumulators: Mapping[ParameterUse, Tensor], origin: str) -> dict[str, Tensor]:
        """Sums gradients over uses and ranks, of which `begin` may have started some; see `GradientSum.total`."""
        early, self._early = self._early, None
        return self._sum.total(accumulators, origin) if early is None else early.finish(accumulators)

    def take_kept(self) -> dict[str, Tensor]:
        """Sums what was kept back. Collective."""
        if not self._may_have_kept:
            return {}
        kept, self._kept, self._may_have_kept = self._kept, {}, False
        is_any = any(self._world.gather_objects(bool(kept), "summing kept gradients"))
        return self._sum.total(kept, None) if is_any else {}


def _taken(stages: Iterable[StageModule]) -> dict[ParameterUse, Tensor]:
    """Takes the gradients away from the leaves of stages."""
    taken: dict[ParameterUse, Tensor] = {}
    for stage in stages:
        for use, leaf in stage.leaves.items():
            if leaf.grad is not None:
                taken[use], leaf.grad = leaf.grad, None
    return taken
