"""Plans of small problems, each against others with every depth, recompute, deferral and schedule."""

from __future__ import annotations

import pytest

from autovaruna.planner.search import make_plan
from tests.planner.every_depth import BETTER, any_problem, better_plan, seconds_of
from tests.products import some

_MISSED_ONCE = [
    *[("single", seed) for seed in (90022, 90200, 100006, 330037)],
    *[("split", seed) for seed in (80046, 80132, 90035, 330014, 770138)],
    *[("shared", seed) for seed in (80078, 210051, 210053, 210064, 210136, 770032, 770050, 770079)],
]
_OTHERS = [(kind, seed) for seed in some(range(110_000, 110_004), 1) for kind in ("single", "split", "shared")]


@pytest.mark.parametrize(("kind", "seed"), [*some(_MISSED_ONCE, 8), *_OTHERS])
def test_no_plan_is_better_by_1_percent_nor_than_the_bound(kind: str, seed: int) -> None:
    better = better_plan(kind, seed, 1_500)
    assert better is None, better


@pytest.mark.parametrize(
    ("kind", "seed", "least_seconds"),
    [
        ("single", 80114, 0.2824040689483809),
        ("split", 80024, 0.5076225813272686),
        ("shared", 70085, 0.18918617088229212),
        ("shared", 81018, 0.16309236763489063),
    ],
)
def test_what_only_many_plans_show_is_found(kind: str, seed: int, least_seconds: float) -> None:
    assert seconds_of(make_plan(any_problem(kind, seed))) * BETTER < least_seconds
