"""What the search finds; `test_every_depth` holds it to all plans of small problems."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autovaruna.graph.records import Size, Value
from autovaruna.planner.prediction import RankOrders
from autovaruna.planner.search import make_plan
from autovaruna.profiler.records import LinkCost
from tests.planner.cases import constrained, make_problem, on_cluster


def test_more_memory_is_never_slower() -> None:
    steps = [make_plan(make_problem(6, 3, 8, 5, memory_bytes=m)).predicted_seconds for m in (1.5e6, 2e6, 4e6, 1e12)]
    assert steps == sorted(steps, reverse=True)


def test_fewer_ranks_are_used_where_that_is_faster() -> None:
    """With links this slow, a second rank costs more than it gives."""
    problem = make_problem(2, 2, 2, link=LinkCost(10.0, 1e3), max_micro_batches=1)
    plan = make_plan(problem)
    assert sorted({rank for stage in plan.stages for rank in stage.ranks}) == [0]


def test_on_slow_links_more_is_in_flight_than_hides_messages_of_a_stage_in_length() -> None:
    link = LinkCost(0.05, 1e9)
    problem = make_problem(4, 2, 8, link=link, num_stages=2, num_micro_batches=8, schedule="1f1b")
    plan = make_plan(problem)
    textbook = make_plan(constrained(problem, in_flight=2))
    assert plan.predicted_seconds < 0.95 * textbook.predicted_seconds


def test_a_cut_finds_a_place_that_no_step_leads_to() -> None:
    """A chain over slow links in which hardly anything crosses at one place, and much at all others."""
    problem = make_problem(40, 2, 1, link=LinkCost(1e-3, 1e6), num_stages=2, num_micro_batches=1)
    sizes = {place: 1e3 if place == 20 else 1e6 for place in range(1, 40)}
    values = tuple(Value(f"v{k}", k - 1, (k,), Size(0, size), True) for k, size in sizes.items())
    plan = make_plan(replace(problem, graph=replace(problem.graph, values=values)))
    assert plan.stages[1].blocks[0] == 20


def test_progress_is_told_and_the_plan_is_the_same_wherever_it_is_made() -> None:
    told: list[tuple[str, float]] = []
    problem = make_problem(9, 3, 8, memory_bytes=1.6e6)
    one, other = make_plan(problem, lambda what, share: told.append((what, share))), make_plan(problem)
    assert one == other
    assert RankOrders(one, problem.graph).planned == RankOrders(other, problem.graph).planned
    assert len({what for what, _ in told}) > 1
    assert all(0 <= share <= 1 for _, share in told)


@pytest.mark.parametrize("seed", [0, 2])
def test_where_messages_take_as_long_as_a_stage_the_plan_is_no_slower_than_two_stages_that_are_given(seed: int) -> None:
    """The cuts make up for the first message's way and the last one's, and the first stage runs far ahead."""
    near = make_problem(64, 2, 32, seed, num_replicas=1, max_stages_per_rank=1)
    costs = near.cost_table.at(4.0)
    stage_seconds = float((costs.forward_seconds + costs.backward_seconds).sum()) / 2
    typical_bytes = sorted(value.size.at(4) for value in near.graph.values)[32]
    link = LinkCost(1e-5, 2 * typical_bytes / stage_seconds)
    problem = on_cluster(near, hosts=("a", "b"), remote_link=link)
    given = [make_plan(constrained(problem, num_stages=2, num_micro_batches=count)) for count in (4, 8, 16)]
    assert make_plan(problem).predicted_seconds <= min(plan.predicted_seconds for plan in given)
