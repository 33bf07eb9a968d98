"""Plans of small problems, each against others with every depth, recompute and schedule."""

from __future__ import annotations

import random

import pytest

from autovaruna.planner.problem import Problem
from autovaruna.planner.search import make_plan
from autovaruna.profiler.records import LinkCost
from tests.planner.brute import better_plan
from tests.planner.cases import constrained, make_problem, make_uneven, on_cluster, with_memory
from tests.products import some

SCHEDULES = {
    "single": ("auto", "auto", "auto", "1f1b", "varuna", "gpipe"),
    "shared": ("auto", "auto", "1f1b", "varuna", "interleaved", "gpipe"),
}
_LINKS = LinkCost(1e-5, 1e10), LinkCost(2e-3, 1e6), LinkCost(1e-4, 1e7)
_FULL_BYTES = {
    "single": {90022: 956454.4, 90200: 731548.0, 100006: 385460.8, 330037: 1011326.4},
    "shared": {80078: 620596.0, 210051: 811588.0, 210053: 848212.8, 210064: 347428.0, 210136: 332385.6},
}
"""What a rank held with all memory, where a draw was kept: another plan with all memory must not change the draw."""


def any_problem(kind: str, seed: int) -> Problem:
    """A few blocks on uneven ranks, fragmented memory or not, which may be short, and some settings forced."""
    dice = random.Random(seed * 9973 + 11)
    sizes = dice.randint(2, 6 if kind != "shared" else 5), dice.randint(2, 4 if kind == "single" else 3)
    batch = dice.randint(3, 7)
    if kind == "shared":
        sizes, batch = (dice.randint(3, 5), dice.randint(2, 3)), dice.randint(2, 5)
    shape = {"skips": dice.randint(0, 3), "tied": dice.randint(0, 1), "loose": dice.random() < 0.3}
    problem = make_problem(*sizes, batch, seed, **shape, link=dice.choice(_LINKS))
    if dice.random() < 0.7:
        problem = make_uneven(problem, dice, dice.randint(1, 3))
    settings = _some_settings(kind, *sizes, batch, dice)
    problem = on_cluster(constrained(problem, **settings), fragmentation=dice.choice([1.0, 1.0, 1.2]))
    problem = with_memory(problem, 1e12)
    share = dice.choice([1e3, 0.97, 0.9, dice.uniform(0.5, 1), dice.uniform(0.5, 1)])
    full = _FULL_BYTES[kind].get(seed) or max(make_plan(problem).rank_bytes())
    limits = tuple(full * share * dice.choice([1, 1, 1, 0.85]) for _ in range(problem.cluster.num_ranks))
    return on_cluster(problem, memory_bytes=limits)


def _some_settings(kind: str, num_blocks: int, num_ranks: int, batch: int, dice: random.Random) -> dict[str, object]:
    is_shared = kind == "shared"
    settings: dict[str, object] = {"schedule": dice.choice(SCHEDULES[kind]), "max_stages_per_rank": 1 + is_shared}
    if dice.random() < 0.15:
        settings["recompute"] = dice.choice(["none", "all"])
    if dice.random() < 0.1:
        settings["in_flight"] = dice.choice([1, 2])
    if dice.random() < 0.15:
        settings["num_micro_batches"] = dice.randint(1, batch)
    if dice.random() < 0.1 and not is_shared:
        settings["num_stages"] = dice.randint(1, min(num_blocks, num_ranks))
    if dice.random() < 0.15 and is_shared:
        settings["num_stages"] = dice.randint(min(num_blocks, num_ranks + 1), num_blocks)
    return settings


_MISSED_ONCE = [(kind, seed) for kind, seeds in _FULL_BYTES.items() for seed in seeds]
_MISSED_ONCE += [("shared", seed) for seed in (770032, 770050, 770079)]
_OTHERS = [(kind, seed) for seed in some(range(110_000, 110_004), 1) for kind in ("single", "shared")]


@pytest.mark.parametrize(("kind", "seed"), [*some(_MISSED_ONCE, 8), *_OTHERS])
def test_no_plan_is_better_by_1_percent_nor_than_the_bound(kind: str, seed: int) -> None:
    """Nor by so little as its bound rules out."""
    better = better_plan(any_problem(kind, seed))
    assert better is None, better
