"""Plans whose replicas share the optimizer's state: what they hold, what they take, and when they are chosen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner.deployment import Fingerprint, deployment_of, load, plan_from, save
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan, share_out
from autovaruna.planner.search import make_plan, plan_with_sharing
from autovaruna.profiler.records import OptimizerCost
from tests.planner.cases import constrained, loading_complaint, make_problem, with_memory

choose: Any = partial(plan_with_sharing, make=make_plan)


def replicas(num_ranks: int, factor: float = 2.0, seconds_per_byte: float = 0.0, **fixed: Any) -> Problem:
    """Returns a problem whose only plan has one stage on all ranks."""
    problem = make_problem(8, num_ranks, 8, num_stages=1, num_replicas=num_ranks, num_micro_batches=8, **fixed)
    cost = OptimizerCost(0.0, seconds_per_byte)
    return replace(problem, optimizer_bytes_factor=factor, optimizer_cost=cost)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_holds_less_by_the_state_that_others_own(num_ranks: int) -> None:
    problem = replicas(num_ranks)
    whole, shared = (max(choose(problem, each).rank_bytes()) for each in (False, True))
    sizes = {each.name: each.num_bytes for each in problem.graph.parameters if each.needs_gradient}
    owners = share_out(sizes, dict.fromkeys(sizes, range(num_ranks)))
    owned = max(sum(sizes[name] for name in sizes if owners[name] == rank) for rank in range(num_ranks))
    assert whole - shared == pytest.approx(2.0 * (sum(sizes.values()) - owned), rel=0.1)


def test_it_is_chosen_where_nothing_else_fits() -> None:
    problem = replicas(4)
    needed = [max(choose(problem, each).rank_bytes()) for each in (False, True)]
    tight = with_memory(problem, sum(needed) / 2)
    with pytest.raises(PlanError):
        choose(tight, False)
    assert choose(tight, "auto").shares_state and choose(tight, True).shares_state
    with pytest.raises(PlanError):
        choose(with_memory(problem, 0.5 * needed[1]), "auto")


def test_it_is_chosen_where_memory_is_short_and_it_is_faster_by_more_than_noise() -> None:
    slow, quick = replicas(4, seconds_per_byte=1e-6), replicas(4, seconds_per_byte=1e-10)
    limit = 1.5 * max(choose(slow, False).rank_bytes())
    plan = choose(with_memory(slow, limit), "auto")
    assert plan.shares_state and plan.predicted_seconds < 0.98 * choose(slow, False).predicted_seconds
    assert not choose(slow, "auto").shares_state and not choose(with_memory(quick, limit), "auto").shares_state
    one_each = constrained(with_memory(slow, limit), num_replicas=1, num_stages=4)
    assert not choose(one_each, "auto").shares_state


def test_a_step_of_the_optimizer_is_shared_and_weights_are_given_back() -> None:
    problem = replicas(2, seconds_per_byte=1e-6)
    whole, shared = (choose(problem, each).stages[0] for each in (False, True))
    assert shared.optimizer_seconds == pytest.approx(whole.optimizer_seconds / 2, rel=0.2)
    latency = problem.cluster.all_reduce_latency_seconds * 2
    assert shared.reduce_seconds == pytest.approx(whole.reduce_seconds + latency)


def test_a_saved_plan_says_so_and_is_held_to_its_memory(tmp_path: Path) -> None:
    problem = replicas(4)
    plan = choose(problem, True)
    save(tmp_path / "plan.json", deployment_of(plan, problem.graph, Fingerprint("g", num_ranks=4, hosts=(4,))))
    loaded: Plan = plan_from(load(tmp_path / "plan.json"), problem.graph)
    assert loaded.shares_state
    limits = (1.01 * max(plan.rank_bytes()),) * 4
    assert loading_complaint(replace(loaded, shares_state=False), problem, limits).startswith("rank 0 has")
