"""What a step is charged for: sums, the optimizer, overhead, what ranks exchange; prices by another profile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autovaruna.graph.records import Output, Size
from autovaruna.planner.arrays import RangeTables
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.costs import AllReduces
from autovaruna.planner.exchange import Exchange, engine_seconds
from autovaruna.planner.prediction import pipeline_of, policy_of
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan, StagePlan
from autovaruna.planner.search import make_plan
from autovaruna.planner.table import explain
from autovaruna.profiler.records import LinkCost, OptimizerCost
from autovaruna.schedule.pipeline import Edge, Pipeline, StageTimes
from autovaruna.schedule.simulator import simulate
from tests.planner.cases import make_cluster, make_problem, on_cluster


def plan_of(problem: Problem, ranks: tuple[tuple[int, ...], ...], count: int = 4) -> Plan:
    n = len(problem.graph.blocks)
    planner = Planner(problem, RangeTables(problem.graph, range(n + 1)))
    plan = planner.build(Candidate(tuple(n * s // len(ranks) for s in range(len(ranks))), ranks, count))
    assert plan
    return planner.predict_whole(plan)


def test_a_ring_sends_nearly_twice_the_bytes_pays_latency_for_each_rank_and_is_faster_within_a_host() -> None:
    all_reduces = AllReduces(replace(make_cluster(4), all_reduce_bytes_per_second=1e9, all_reduce_latency_seconds=1e-3))
    assert all_reduces.seconds((0,), 1e9) == 0
    assert all_reduces.seconds((0, 1), 1e9) == pytest.approx(2e-3 + 1.0)
    assert all_reduces.seconds((0, 1, 2, 3), 1e9) == pytest.approx(4e-3 + 1.5)
    apart = replace(make_cluster(4), hosts=tuple("aabb"), remote_link=LinkCost(1e-4, 1e9))
    all_reduces = AllReduces(replace(apart, all_reduce_bytes_per_second=1e9))
    assert all_reduces.seconds((0, 2), 1e9) == pytest.approx(10 * all_reduces.seconds((0, 1), 1e9))


def test_all_reduce_overlaps_with_the_backwards_of_earlier_stages_only() -> None:
    problem = make_problem(8, 4, 8)
    slow = on_cluster(problem, all_reduce_bytes_per_second=2e6)
    ranks = ((0, 1), (2, 3))
    plain, reduced = plan_of(problem, ranks), plan_of(slow, ranks)
    exposed = reduced.predicted_seconds - plain.predicted_seconds
    assert exposed < sum(stage.reduce_seconds for stage in reduced.stages)
    assert exposed >= reduced.stages[0].reduce_seconds - plain.stages[0].reduce_seconds - 1e-9


def test_sums_over_hosts_begin_beside_the_last_backward_as_far_as_processors_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each block's gradients wait for their own backward, and behind them for those of earlier blocks."""
    monkeypatch.setattr("autovaruna.planner.costs.EARLY_BYTES", 0)
    rate, busy, problem = 1e7, 1e-9, make_problem(8, 2, 8)
    on_host = replace(problem, profile=replace(problem.profile, device="cpu"))

    def lead(of: Problem, hosts: str, **more: float) -> float:
        given = {"remote_link": LinkCost(0.0, rate, busy), "all_reduce_bytes_per_second": rate, **more}
        return plan_of(on_cluster(of, hosts=hosts, **given), ((0, 1),), 2).stages[0].reduce_lead_seconds

    num_bytes = [parameter.num_bytes for parameter in problem.graph.parameters]
    backward, free = problem.cost_table.at(4.0).backward_seconds, 1 / rate - 2 * busy
    expected = min(sum(num_bytes[block + 1 :]) * free + backward[:block].sum() for block in range(8))
    assert lead(on_host, "ab") == pytest.approx(0.9 * expected) and expected > 0
    assert lead(on_host, "aa") == lead(on_host, "ab", cores_per_rank=0.5) == lead(problem, "ab") == 0


def test_a_message_between_hosts_keeps_both_ends_busy_and_one_within_a_host_does_not() -> None:
    """One micro-batch, so that nothing hides: sender and receiver pay for each byte of both messages."""
    problem, busy = make_problem(8, 2, 8), 1e-4
    links = {"local_link": LinkCost(0.0, math.inf), "remote_link": LinkCost(0.0, math.inf, busy)}
    near, far = (plan_of(on_cluster(problem, hosts=hosts, **links), ((0,), (1,)), 1) for hosts in ("aa", "ab"))
    (edge,) = pipeline_of(near, problem.graph).edges
    more = 2 * busy * (edge.forward_bytes + edge.backward_bytes)
    assert far.predicted_seconds - near.predicted_seconds == pytest.approx(more) and more > 0


def test_ranks_with_several_stages_are_planned_for_only_while_messages_cost_their_processors_little() -> None:
    problem = make_problem(12, 2, 8, num_replicas=1)
    rate = {"hosts": "ab", "overhead_seconds": 0.0}
    free, busy = (make_plan(on_cluster(problem, remote_link=LinkCost(0.0, 1e9, each), **rate)) for each in (0.0, 1e-3))
    assert free.is_shared and not busy.is_shared


def test_ties_are_summed_over_all_ranks_that_hold_them() -> None:
    with_ties, without = (plan_of(make_problem(8, 2, 8, tied=n), ((0,), (1,))) for n in (4, 0))
    assert all(stage.reduce_seconds == 0 for stage in without.stages)
    assert any(stage.reduce_seconds > 0 for stage in with_ties.stages)


def test_the_optimizer_ends_the_step_and_slow_ranks_step_slowly() -> None:
    problem = make_problem(8, 2, 8)
    cost = OptimizerCost(1e-3, 1e-9)
    plain, stepped = (plan_of(replace(problem, optimizer_cost=c), ((0,), (1,))) for c in (OptimizerCost(), cost))
    trained = [stage.parameter_bytes for stage in stepped.stages]
    assert [s.optimizer_seconds for s in stepped.stages] == pytest.approx([4e-3 + 1e-9 * each for each in trained])
    assert stepped.predicted_seconds == pytest.approx(plain.predicted_seconds + stepped.stages[0].optimizer_seconds)
    uneven = on_cluster(replace(problem, optimizer_cost=OptimizerCost(1e-3)), speeds=(0.5, 1.0))
    assert plan_of(uneven, ((0, 1),)).optimizer_seconds() == pytest.approx((16e-3, 8e-3))


def test_every_instruction_has_overhead() -> None:
    problem = make_problem(8, 1, 8)
    plain, slow = (plan_of(on_cluster(problem, overhead_seconds=each), ((0,),)) for each in (0.0, 0.25))
    assert slow.predicted_seconds == pytest.approx(plain.predicted_seconds + 0.25 * 2 * 4)


def test_plan_and_graph_are_enough_for_the_prediction_and_the_printout_names_every_part() -> None:
    problem = replace(make_problem(8, 3, 12, num_stages=2, tied=1), optimizer_cost=OptimizerCost(1e-3, 1e-9))
    plan = make_plan(on_cluster(problem, overhead_seconds=1e-3, all_reduce_latency_seconds=1e-3))
    again = simulate(pipeline_of(plan, problem.graph), policy_of(plan.schedule))
    assert again.step_seconds == plan.predicted_seconds
    for part in ("work", "imbalance", "all-reduce", "overhead", "optimizer"):
        assert f"\n{part} " in explain(plan, problem.graph)


LATENCY, RATE = 3e-3, 1e7
FORWARD, BACKWARD, NUM_BLOCKS, BATCH = 4e-3, 8e-3, 4, 8
SAMPLE_BYTES, OUTPUT_BYTES = 64, 1000
APART, ALIKE = ((0,), (1,)), ((0, 1),)


def problem(groups: tuple[tuple[int, ...], ...], has_loss: bool = True, has_outputs: bool = False) -> Problem:
    known = make_problem(NUM_BLOCKS, 2, BATCH)
    cluster = replace(make_cluster(2), hosts=("a", "b"), remote_link=LinkCost(LATENCY, RATE))
    outputs = (Output("scores", NUM_BLOCKS - 1, Size(0, OUTPUT_BYTES)),) if has_outputs or not has_loss else ()
    graph = replace(known.graph, outputs=outputs)
    return replace(known, graph=graph, cluster=cluster, input_groups=groups, has_loss=has_loss)


def plan(*ranks: tuple[int, ...], num_micro_batches: int = 4, schedule: str = "1f1b") -> Plan:
    each = NUM_BLOCKS // len(ranks)
    stages = [
        StagePlan(tuple(range(s * each, (s + 1) * each)), of, False, len(ranks) - s, FORWARD, BACKWARD)
        for s, of in enumerate(ranks)
    ]
    return Plan(tuple(stages), 2, num_micro_batches, BATCH / num_micro_batches, schedule)


@pytest.mark.parametrize("groups", [(), APART, ALIKE])
def test_ranks_of_one_host_that_talk_at_once_exchange_nothing(groups: tuple[tuple[int, ...], ...]) -> None:
    near = replace(problem(groups), cluster=make_cluster(2, link=LinkCost(0.0, 1e30)))
    assert Exchange(near).seconds(plan((0,), (1,))) == pytest.approx(0.0, abs=1e-9)


def test_an_idle_rank_hears_of_the_loss_and_tells_of_its_next_call_with_its_samples() -> None:
    """The second micro-batch is rank 1's: it is there two latencies and its transfer after the first begins."""
    assert Exchange(problem(ALIKE)).seconds(plan((0,))) == pytest.approx(2 * LATENCY)
    transfer = SAMPLE_BYTES * BATCH / 4 / RATE
    assert Exchange(problem(APART)).seconds(plan((0,), (1,))) == pytest.approx(2 * LATENCY + transfer - FORWARD)


@pytest.mark.parametrize(("num_ranks", "rounds"), [(2, 1), (5, 3), (8, 3), (1000, 10)])
def test_ranks_agree_in_as_many_rounds_as_it_takes_to_double_up_to_all(num_ranks: int, rounds: int) -> None:
    known = problem(APART)
    hosts = tuple(str(rank % 4) for rank in range(num_ranks))
    cluster = replace(make_cluster(num_ranks), hosts=hosts, remote_link=LinkCost(LATENCY, RATE))
    known = replace(known, cluster=cluster, input_groups=tuple((rank,) for rank in range(num_ranks)))
    stage = replace(plan((0,)).stages[0], ranks=tuple(range(num_ranks)), reduce_seconds=1.0)
    made = replace(plan((0,)), stages=(stage,), num_ranks=num_ranks, num_micro_batches=num_ranks)
    assert Exchange(known).seconds(made) == pytest.approx(rounds * LATENCY)


def test_outputs_go_to_the_ranks_and_their_gradients_come_back_or_beside_a_loss_delay_the_next_call() -> None:
    """All four micro-batches are of both ranks; rank 1 makes the outputs, and has the gradients it goes on from."""
    outputs = LATENCY + BATCH * OUTPUT_BYTES / RATE  # rank 0 has them, and that is when all may go backward
    back = LATENCY  # what rank 1 waits until it has heard of rank 0's backward
    found = Exchange(problem(ALIKE, has_loss=False)).seconds(plan((0,), (1,), schedule="gpipe"))
    assert found == pytest.approx(outputs + back)
    known = problem(ALIKE, has_outputs=True)
    assert Exchange(known).seconds(plan((0,))) == pytest.approx(2 * LATENCY + BATCH * OUTPUT_BYTES / RATE)
    assert Exchange(replace(known, delivers_outputs=False)).seconds(plan((0,))) == pytest.approx(2 * LATENCY)


def test_the_engine_takes_of_each_core_a_step_and_of_shared_ones_those_of_all_ranks_and_messages() -> None:
    stages = tuple(StageTimes((rank,), 1.0, 1.0, 1) for rank in range(2))
    alone = Pipeline(stages, (Edge(0, 1, 0.0, 0.0),), 4, 8, overhead_seconds=1e-4)
    shared = replace(alone, cores_per_rank=0.5)
    step = engine_seconds(alone)
    assert step == pytest.approx(34e-4)
    assert engine_seconds(shared) == pytest.approx(4 / 2 * step + (8 * 2 + 4 * 2) * 5e-4 / 2)
    assert engine_seconds(replace(alone, overhead_seconds=0.0)) == 0.0
