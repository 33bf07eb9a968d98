"""Measures the parts of a model on all ranks together: each part on two ranks, some time apart.

What else runs on a machine slows what is measured, now one rank, now another, for seconds at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from autovaruna.graph.traced import TracedModel
from autovaruna.parallel.speeds import SpeedWatch
from autovaruna.profiler.measure import Key, PartCost, measure, merge, settle
from autovaruna.runtime.worlds.on_all import gather_on_all
from autovaruna.settings import Settings

_MOST_TURNS = 2
_BUDGET_SECONDS = 10.0


@dataclass(frozen=True)
class Turn:
    """What a rank measures at a time.

    Attributes:
        share: ``(k, num_ranks)``: this rank measures every num_ranks-th part from the k-th.
        iterations: samples of each measurement.
        budget_seconds: after which each part is sampled once only.
        place, num_turns: which turn this is.
    """

    share: tuple[int, int]
    iterations: int
    budget_seconds: float
    place: int
    num_turns: int

    def progress(self, advance: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Returns what is to be told of the parts of this turn, so that `advance` hears of the parts of all turns."""
        return lambda done, total: advance(self.place * total + done, self.num_turns * total)


@dataclass(frozen=True)
class Subject:
    """A model that is measured by all ranks.

    Attributes:
        model: The model.
        traced: Its graph.
        tensors: Tensors of a sample call.
        settings: The settings.
        watch: Of the ranks' speeds; looks before each turn of measuring and after the last.
    """

    model: nn.Module
    traced: TracedModel
    tensors: Sequence[Tensor]
    settings: Settings
    watch: SpeedWatch

    def measure(
        self,
        sizes: Sequence[int],
        known: Collection[Key],
        *,
        splits: bool = False,
        advance: Callable[[int, int], None] | None = None,
    ) -> dict[Key, PartCost]:
        """Measures what is not known, in seconds of a rank of speed 1. Collective.

        Args:
            sizes: Samples in a micro-batch.
            known: Parts that are not measured.
            splits: Whether weight gradients are measured apart, too.
            advance: Hears of the parts measured so far on this rank, and of their number.

        Returns:
            The cost of every part that was measured, the same on every rank.
        """

        def own_share(turn: Turn) -> dict[Key, PartCost]:
            return measure(
                self.traced,
                self.model,
                sizes,
                self.watch.device,
                iterations=turn.iterations,
                budget_seconds=turn.budget_seconds,
                splits=splits,
                share=turn.share,
                known=known,
                inputs=self.tensors,
                on_progress=turn.progress(advance) if advance else None,
            )

        return measure_together(self.watch, self.settings.profile_iterations, own_share)


def measure_together(
    watch: SpeedWatch, iterations: int, own_share: Callable[[Turn], dict[Key, PartCost]]
) -> dict[Key, PartCost]:
    """Measures on all ranks, by turns, and joins the results. Collective.

    Args:
        watch: Of the ranks' speeds.
        iterations: Samples of each part, over all turns.
        own_share: Measures this rank's share of a turn.
    """
    world, turns = watch.world, []
    for turn in _turns(iterations, world.rank, world.num_ranks):
        watch.look()
        turns.append(gather_on_all(world, partial(own_share, turn), "measuring"))
    watch.look()
    speeds = watch.speeds_of_samples()
    joined = [merge(map(_at_speed_1, of_ranks, speeds)) for of_ranks in turns]
    return {key: settle([turn[key] for turn in joined]) for key in joined[0]}


def _turns(iterations: int, rank: int, num_ranks: int) -> list[Turn]:
    """Returns the turns of a rank; each takes the parts that the next rank had."""
    num_turns = min(_MOST_TURNS, iterations)
    samples, budget = -(-iterations // num_turns), _BUDGET_SECONDS / num_turns
    return [Turn(((rank + k) % num_ranks, num_ranks), samples, budget, k, num_turns) for k in range(num_turns)]


def _at_speed_1(costs: dict[Key, PartCost], speed: float) -> dict[Key, PartCost]:
    """Returns costs that a rank of some speed has measured in seconds of a rank of speed 1."""
    return {key: cost.with_seconds(speed * seconds for seconds in cost.seconds) for key, cost in costs.items()}
