"""Measures the parts of a model on all ranks together: each part on two ranks, some time apart.

What else runs on a machine slows what is measured, now one rank, now another, for seconds at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autovaruna.parallel.speeds import SpeedWatch
from autovaruna.profiler.measure import Key, PartCost, merge, settle
from autovaruna.runtime.on_all import on_all

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


def measure_together(
    watch: SpeedWatch, iterations: int, own_share: Callable[[Turn], dict[Key, PartCost]]
) -> dict[Key, PartCost]:
    """Measures on all ranks, by turns, and joins the results. Collective.

    Args:
        watch: Of the ranks' speeds; looks before each turn and after the last.
        iterations: Samples of each part, over all turns.
        own_share: Measures this rank's share of a turn.

    Returns:
        The cost of every part, the same on every rank.
    """
    world, turns = watch.world, []
    for turn in _turns(iterations, world.rank, world.num_ranks):
        watch.look()
        mine = on_all(world, lambda turn=turn: own_share(turn), "measuring")  # type: ignore[misc]
        turns.append(world.gather_objects(mine, "sharing the results of measuring"))
    watch.look()
    speeds = watch.speeds()
    return settled(
        [merge(_at_speed_1(each, speed) for each, speed in zip(turn, speeds, strict=True)) for turn in turns]
    )


def settled(turns: Sequence[dict[Key, PartCost]]) -> dict[Key, PartCost]:
    """Returns the cost of each part by all turns."""
    return {key: settle([turn[key] for turn in turns]) for key in turns[0]}


def _turns(iterations: int, rank: int, num_ranks: int) -> list[Turn]:
    """Returns the turns of a rank; each takes the parts that the next rank had."""
    num_turns = min(_MOST_TURNS, iterations)
    samples, budget = -(-iterations // num_turns), _BUDGET_SECONDS / num_turns
    return [Turn(((rank + k) % num_ranks, num_ranks), samples, budget, k, num_turns) for k in range(num_turns)]


def _at_speed_1(costs: dict[Key, PartCost], speed: float) -> dict[Key, PartCost]:
    """Returns costs that a rank of some speed has measured in seconds of a rank of speed 1."""
    return {key: cost.with_seconds(speed * seconds for seconds in cost.seconds) for key, cost in costs.items()}
