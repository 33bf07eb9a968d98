"""Simulated steps: drawings, timelines, seconds, and a log of real ones."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from functools import cache

import pytest

from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.bound import lower_bound
from autovaruna.schedule.pipeline import Edge, Pipeline, StageTimes, latency_depth
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulation import Simulation, render
from autovaruna.schedule.simulator import simulate
from tests.own_time import takes_at_most
from tests.schedule.pipelines import chain, deepened, placed, random_pipeline

F, B = 1.0, 2.0


def seconds(pipeline: Pipeline, name: str = "1f1b") -> float:
    return simulate(pipeline, POLICIES[name]).step_seconds


@pytest.mark.parametrize("name", POLICIES)
def test_equal_stages_without_latency(name: str) -> None:
    for num_stages, num_micro_batches in itertools.product(range(1, 6), range(1, 9)):
        expected = (num_micro_batches + num_stages - 1) * (F + B)
        pipeline = deepened(chain(num_stages, num_micro_batches, F, B))
        assert seconds(pipeline, name) == lower_bound(pipeline) == expected


def test_textbook_depth_pays_for_latency_and_the_deeper_one_hides_it() -> None:
    """With latency c, depth S - s loses 2c for each micro-batch in turn; 2(S - 1 - s) + 1 reaches the lower bound."""
    for num_stages, latency in itertools.product((2, 3, 4, 6), (0.25, 0.5, 1.0)):
        textbook = chain(num_stages, 24, F, B, latency)
        deeper = chain(num_stages, 24, F, B, latency, latency_depth)
        expected = (24 + num_stages - 1) * (F + B) + 2 * (num_stages - 1) * latency
        assert seconds(deeper) == lower_bound(deeper) == expected
        assert seconds(textbook) > 1.05 * seconds(deeper)
    for latency in (1.0, 2.0, 4.0):
        textbook = chain(4, 16, F, B, latency, recompute=F)
        deeper = chain(4, 16, F, B, latency, latency_depth, recompute=F)
        assert seconds(deeper, "varuna") < 0.97 * seconds(textbook)


def test_replicas_share_the_micro_batches() -> None:
    """A stage twice as slow as its neighbours, with two replicas, keeps up with them."""
    stages = (StageTimes((0,), 1.0, 1.0, 5), StageTimes((1, 2), 2.0, 2.0, 3), StageTimes((3,), 1.0, 1.0, 1))
    pipeline = Pipeline(stages, (Edge(0, 1, 0, 0), Edge(1, 2, 0, 0)), 4, 20)
    assert seconds(pipeline) == pytest.approx(20 * 2.0 + 2 + 4, abs=2.0)
    assert seconds(placed(pipeline, [(0,), (1,), (3,)], 4)) >= 20 * 4.0


def test_forward_only_is_the_forwards_alone() -> None:
    pipeline = replace(chain(3, 5, F, B, latency=0.5, recompute=F), needs_gradients=False)
    for policy in POLICIES.values():
        simulation = simulate(pipeline, policy)
        assert simulation.step_seconds == lower_bound(pipeline) == (5 + 2) * F + 2 * 0.5


def test_messages_of_a_pair_of_ranks_share_its_bandwidth_and_none_goes_back_where_there_is_no_gradient() -> None:
    """Messages that take longer than the stages: one follows the other, latency is paid once."""
    stages = (StageTimes((0,), 1.0, 1.0, 1), StageTimes((1,), 1.0, 1.0, 1))
    link = LinkCost(0.5, 10.0)
    pipeline = Pipeline(stages, (Edge(0, 1, 30.0, 0.0),), 2, 4, lambda a, b: link, needs_gradients=False)
    assert seconds(pipeline) == 1.0 + 4 * 3.0 + 0.5 + 1.0
    pipeline = chain(2, 1, F, B, latency=10.0)
    integers = replace(pipeline, edges=(Edge(0, 1, 8.0, 0.0, needs_gradient=False),))
    assert (seconds(pipeline), seconds(integers)) == (2 * F + 2 * B + 20.0, 2 * F + B + 10.0)


def test_all_reduce_overlaps_with_earlier_stages_and_lost_time_is_of_each_kind() -> None:
    """The last stage reduces while the first still goes backward; the first one's all-reduce is at the end."""
    pipeline = chain(2, 4, F, B)
    stages = tuple(replace(stage, reduce_seconds=1.5) for stage in pipeline.stages)
    simulation = simulate(replace(pipeline, stages=stages, optimizer_seconds=(0.5, 4.0)), POLICIES["1f1b"])
    assert [(r.stage, r.start_seconds) for r in simulation.reductions] == [(1, 13.0), (0, 15.0)]
    assert simulation.step_seconds == 13.0 + 1.5 + 4.0
    assert [(lost.sums, lost.optimizer) for lost in simulation.lost] == [(1.5, 0.5), (1.5, 4.0)]
    pipeline = replace(chain(2, 1, F, B, latency=0.5), overhead_seconds=0.25)
    first, last = simulate(pipeline, POLICIES["1f1b"]).lost
    assert (first.work, first.overhead, first.messages, first.bubble) == (3, 0.5, 0.5, 4)
    assert (last.work, last.overhead, last.messages, last.bubble) == (3, 0.5, 0.5, 4)


@pytest.mark.parametrize("name", POLICIES)
def test_twenty_thousand_micro_batches(name: str) -> None:
    pipeline = deepened(chain(2, 20_000, F, B))
    found = []
    assert takes_at_most(30, lambda: found.append(seconds(pipeline, name)))
    assert found[0] == 20_001 * (F + B)


def drawing(name: str) -> str:
    lines = inspect.getdoc(type(POLICIES[name])).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip().startswith("rank"))


def draw(simulation: Simulation) -> str:
    """Returns a drawing with one cell for each second, for steps whose instructions all take one."""
    cells = [["."] * round(simulation.step_seconds) for _ in simulation.acts]
    for event in simulation.events:
        cells[event.rank][round(event.start_seconds)] = str(event.instruction)
    width = max(len(cell) for row in cells for cell in row)
    rows = [" ".join(cell.center(width) for cell in row) for row in cells]
    return "\n".join(f"rank {rank} | {row}".rstrip() for rank, row in enumerate(rows))


@pytest.mark.parametrize("name", POLICIES)
def test_policy_is_its_drawing(name: str) -> None:
    """Four micro-batches, one slot an instruction; three stages, and four on two ranks where ranks have several."""
    shared = placed(chain(4, 4), [(0,), (1,), (0,), (1,)], 2)
    drawn = {
        "gpipe": deepened(chain(3, 4)),
        "1f1b": chain(3, 4),
        "varuna": chain(3, 4, recompute=1.0),
        "interleaved": shared,
    }
    assert draw(simulate(drawn[name], POLICIES[name])) == drawing(name)


def test_timeline_of_two_stages() -> None:
    pipeline = chain(2, 2, 1.0, 2.0)
    stages = (replace(pipeline.stages[0], reduce_seconds=1.0), pipeline.stages[1])
    text = render(simulate(replace(pipeline, stages=stages), POLICIES["1f1b"]), 96)
    assert text.splitlines() == [
        "rank 0 |0F0>>0F1>>..........0B0<<<<<<<.....0B1<<<<<<<+++++| work 60%  bubble 30%  all-reduce 10%",
        "rank 1 |.....1F0>>1B0<<<<<<<1F1>>1B1<<<<<<<...............| work 60%  bubble 40%",
        "step 10 s    > forward  o recompute  < backward  + all-reduce  . idle",
    ]


def test_an_all_reduce_over_hosts_goes_on_beside_the_last_backward_and_behind_that_of_a_later_stage() -> None:
    """A last backward is from 3 to 5: what leads by 1.5 ends at 7.5, and by 2 where the ranks still sum until then."""
    stage = StageTimes((0, 1), 1.0, 2.0, 1, reduce_seconds=4.0, reduce_lead_seconds=1.5)
    alone = Pipeline((stage,), (), 2, 2)
    assert seconds(alone) == lower_bound(alone) == 3.0 + 2.5
    later = replace(stage, backward_seconds=1.0, reduce_seconds=3.0, reduce_lead_seconds=1.0)
    both = Pipeline((replace(stage, reduce_seconds=2.0), later), (Edge(0, 1, 0, 0),), 2, 2)
    first, second = sorted(simulate(both, POLICIES["1f1b"]).reductions, key=lambda each: each.start_seconds)
    assert (first.stage, first.start_seconds, first.end_seconds) == (1, 2.0, 5.0)
    assert (second.stage, second.start_seconds, second.end_seconds) == (0, 5.0, 7.0)


NUM_STAGES, NUM_REPLICAS, NUM_MICRO_BATCHES = 49, 6, 683
SHARE = NUM_MICRO_BATCHES / NUM_REPLICAS
LOGGED = 12
FORWARD, RECOMPUTE, BACKWARD = 28.1 / SHARE, 27.7 / SHARE, 51.3 / SHARE
FIRST_SECONDS, LAST_SECONDS = 57.0, 72.0


def stage_times(stage: int) -> StageTimes:
    """An interior stage as stage 12; the first and the last with the same proportions of their own sums."""
    ends = {0: FIRST_SECONDS / (28.1 + 27.7 + 51.3), NUM_STAGES - 1: LAST_SECONDS / (28.1 + 51.3)}
    scale = ends.get(stage, 1.0)
    return StageTimes(
        ranks=tuple(range(stage * NUM_REPLICAS, (stage + 1) * NUM_REPLICAS)),
        forward_seconds=FORWARD * scale,
        backward_seconds=BACKWARD * scale,
        recompute_seconds=RECOMPUTE * scale,
        needs_recompute=True,
        in_flight=max(1, 3 * (NUM_STAGES - 1 - stage)),
    )


@cache
def simulated(reduce_seconds: float) -> Simulation:
    stages = tuple(replace(stage_times(s), reduce_seconds=reduce_seconds) for s in range(NUM_STAGES))
    edges = tuple(Edge(s, s + 1, 0.0, 0.0) for s in range(NUM_STAGES - 1))
    pipeline = Pipeline(stages, edges, NUM_STAGES * NUM_REPLICAS, NUM_MICRO_BATCHES)
    return simulate(pipeline, POLICIES["varuna"])


def last_backward(simulation: Simulation, stage: int) -> float:
    ranks = range(stage * NUM_REPLICAS, (stage + 1) * NUM_REPLICAS)
    return max(simulation.acts[rank][-1][1] for rank in ranks)


@pytest.mark.parametrize(("exposed", "measured"), [(13.7, 143.7), (20.0, 149.6)])
def test_step_of_the_log(exposed: float, measured: float) -> None:
    """Predicts 148.4 and 154.7 s for the fastest and the slowest step of the log, 3 % more than measured.

    What the log says: 20.75 B parameters on 49 stages of 6 replicas; 683 micro-batches; on stage 12 a step's forwards
    take 28.1 s, recomputes 27.7 s, backwards 51.3 s; the first stage computes 57 s, the last 72 s; 143.7 to 149.6 s a
    step, of which 13.7 to 20 s of all-reduce are exposed.

    Assumptions: the micro-batches are those of all replicas; every interior stage is like stage 12, and the first and
    the last divide their sums as it does, but that the last one never recomputes; the order is Varuna's, with
    3 (S - 1 - s) micro-batches in flight; messages, the executor and the optimizer are within the log's times. These
    are of a rank of stage 12: both all-reduces are exposed from its last backward on, in which the 12 stages before it
    still go backward. If they came after that of the first stage, steps would be predicted 7 % above the log.
    """
    cool_down = last_backward(simulated(0.0), 0) - last_backward(simulated(0.0), LOGGED)
    assert cool_down == pytest.approx(LOGGED * BACKWARD, rel=0.1)
    predicted = simulated(exposed - cool_down).step_seconds
    assert abs(predicted / measured - 1) < 0.05
    assert abs(last_backward(simulated(0.0), LOGGED) / (measured - exposed) - 1) < 0.05


def test_work_of_each_stage_is_that_of_the_log() -> None:
    for stage, seconds in ((0, FIRST_SECONDS), (LOGGED, 107.1), (NUM_STAGES - 1, LAST_SECONDS)):
        work = simulated(0.0).lost[stage * NUM_REPLICAS].work
        assert work == pytest.approx(seconds, rel=0.005)


def sharing(pipeline: Pipeline, cores_per_rank: float) -> Simulation:
    return simulate(replace(pipeline, cores_per_rank=cores_per_rank), POLICIES["1f1b"])


def test_replicas_that_share_cores_take_longer_by_as_many_as_there_are_and_on_one_core_there_is_no_bubble() -> None:
    pipeline = placed(chain(1, 8), [(0, 1, 2, 3)], 4)
    assert sharing(pipeline, 0.5).step_seconds == pytest.approx(2 * sharing(pipeline, 1.0).step_seconds)
    assert sharing(chain(3, 6), 1 / 3).step_seconds == pytest.approx(3 * 6 * 2.0)


def test_stages_that_share_cores_slow_each_other_down_while_both_are_busy_or_sum() -> None:
    """Of four stages on two cores two are busy at first, and three and four are later: a forward takes 1.5, then 2."""
    ends = [event.end_seconds for event in sharing(chain(4, 8), 0.5).events if event.rank == 0]
    assert ends[:4] == pytest.approx([1.0, 2.0, 3.5, 5.5])
    pipeline = placed(chain(2, 4), [(0, 1), (2, 3)], 4)
    first, second = pipeline.stages
    pipeline = replace(pipeline, stages=(first, replace(second, reduce_seconds=2.0)))
    assert sharing(pipeline, 1.0).step_seconds == pytest.approx(7.0)
    assert sharing(pipeline, 0.5).step_seconds == pytest.approx((4 * 2 * 2.0 + 2 * 2.0) / 2)


@pytest.mark.parametrize("seed", range(20))
def test_shared_cores_take_no_less_than_the_bound_and_add_up(seed: int) -> None:
    pipeline = deepened(replace(random_pipeline(seed), cores_per_rank=0.4))
    shared, alone = sharing(pipeline, 0.4), sharing(pipeline, 1.0)
    assert lower_bound(pipeline) <= shared.step_seconds * (1 + 1e-9)
    assert alone.step_seconds <= shared.step_seconds * (1 + 1e-9)
    assert shared.step_seconds <= alone.step_seconds * max(1.0, 1 / 0.4) * (1 + 1e-9)
    assert shared.schedule == alone.schedule
    assert all(sum(lost.parts.values()) == pytest.approx(shared.step_seconds) for lost in shared.lost)
