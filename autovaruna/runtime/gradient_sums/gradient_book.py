"""Takes the gradients of a step from the stages, keeps back those that are not to be summed yet, and gives them out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from torch import Tensor

from autovaruna.runtime.gradient_sums.gradients import GradientSum, Summation
from autovaruna.runtime.weights.elsewhere import Elsewhere, note_gradients
from autovaruna.runtime.weights.placement import OwnedState
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

    def begin(self, origin: str) -> None:
        """Begins a step whose gradients will be summed, stage by stage if ranks know what they will sum."""
        self._early = self._sum.begin(origin)

    def end_stage(self, stage: int) -> None:
        """Starts the sums of a stage whose last gradients on this rank are there; never blocks."""
        if self._early is not None:
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

    def forget_step(self) -> None:
        """Drops what a step that has failed leaves behind."""
        self._early = None
        _taken(self._stages)


class Backwards:
    """The caller's backwards through all calls of one model, and the gradients that they have left to be summed.

    Args:
        state: The model's parameters.
        books: Those of the model's graphs, which grow with these.

    Attributes:
        num: how many backwards there were.
        last_gradient: what came into the last one.
    """

    def __init__(self, state: OwnedState, books: Sequence[GradientBook]) -> None:
        self.num = 0
        self.last_gradient = "none"
        self._state = state
        self._books = books
        self._owes_gradients = False

    def note(self, gradient: str) -> None:
        """Counts a backward of the caller, and the gradient that comes into it."""
        self.num += 1
        self.last_gradient = gradient

    def note_gradients(self, is_summed: bool) -> None:
        """Shows gradients of the parameters that other ranks hold, where plain PyTorch has them."""
        self._owes_gradients = not is_summed
        if is_summed:
            note_gradients(self._away)

    def synchronise(self) -> None:
        """Sums the gradients that were kept back and adds them to ``.grad``. Collective."""
        self._add(self._kept())
        if self._owes_gradients:
            self.note_gradients(True)

    def take_kept(self) -> dict[str, Tensor]:
        """Sums the gradients that were kept back; no backward gives a parameter its own that was frozen since."""
        kept = self._kept()
        if not kept:
            return {}
        parameters = self._state.parameters()
        self._add({name: total for name, total in kept.items() if not parameters[name].requires_grad})
        return {name: total for name, total in kept.items() if parameters[name].requires_grad}

    def forget_step(self) -> None:
        """Drops what a step that has failed leaves behind."""
        for book in self._books:
            book.forget_step()

    def _add(self, totals: Mapping[str, Tensor]) -> None:
        parameters = self._state.parameters()
        for name, total in totals.items():
            gradient = parameters[name].grad
            parameters[name].grad = total if gradient is None else gradient.add_(total)

    def _kept(self) -> dict[str, Tensor]:
        """Sums the gradients that were kept back and returns them by parameter. Collective."""
        totals: dict[str, Tensor] = {}
        for book in self._books:
            for name, total in book.take_kept().items():
                totals[name] = totals[name].add_(total) if name in totals else total
        return totals

    @cached_property
    def _away(self) -> list[Elsewhere]:
        """The parameters that other ranks hold."""
        return [each for each in self._state.parameters().values() if isinstance(each, Elsewhere)]


def _taken(stages: Iterable[StageModule]) -> dict[ParameterUse, Tensor]:
    """Takes the gradients away from the leaves of stages."""
    taken: dict[ParameterUse, Tensor] = {}
    for stage in stages:
        for use, leaf in stage.leaves.items():
            if leaf.grad is not None:
                taken[use], leaf.grad = leaf.grad, None
    return taken
