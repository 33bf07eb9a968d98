"""Memory: one formula for one stage and for all ranges, and its laws."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from autovaruna.graph.records import Graph
from autovaruna.planner.arrays import Array, Costs, CostTable, RangeTables, gradient_bytes
from autovaruna.planner.prediction import Edges
from autovaruna.planner.records import BlockBytes, Plan, StagePlan
from autovaruna.planner.stage_memory import Holdings, HoldingsOfRanges, MemoryModel
from tests.planner.cases import make_graph, make_profile


def most(model: MemoryModel, held: Holdings[float], in_flight: int, share: float = math.inf) -> float:
    """The most on one replica, without recompute."""
    return model.of_stage(held, needs_recompute=False).at(in_flight, share)


def case(seed: int) -> tuple[Graph, random.Random]:
    rng = random.Random(seed)
    return make_graph(rng.randint(1, 9), rng, num_skips=rng.randint(0, 4), num_tied=rng.randint(0, 3)), rng


def holdings_of_stage(graph: Graph, costs: Costs, blocks: Collection[int]) -> Holdings[float]:
    """What a stage of any blocks holds, added up block by block."""
    inside, size = set(blocks), math.ceil(costs.micro_batch_size)
    used = [p for p in graph.parameters if not inside.isdisjoint(p.blocks)]
    trained = [p for p in used if p.needs_gradient]
    last = max(inside)
    held = [v for v in graph.values if v.producer in inside or not inside.isdisjoint(v.consumers)]
    received = [v for v in held if v.producer not in inside]
    sent = [v for v in held if max(v.consumers) > last]
    index = sorted(inside)
    saved = costs.saved_bytes[index]
    gradients = gradient_bytes(graph, graph.parameters)[index]
    at_peak, after = saved.cumsum() + costs.work_bytes[index] - saved.sum(), gradients.sum() - gradients.cumsum()
    return Holdings(
        parameters=float(sum(p.num_bytes for p in used)),
        trained=float(sum(p.num_bytes for p in trained)),
        largest=float(max((p.num_bytes for p in trained), default=0)),
        tied=float(sum(p.num_bytes * len(inside & set(p.blocks)) for p in trained if len(p.blocks) > 1)),
        tied_once=float(sum(p.num_bytes for p in trained if len(p.blocks) > 1)),
        buffers=float(sum(graph.blocks[k].buffer_bytes for k in inside)),
        inputs=sum(i.size.at(size) for i in graph.inputs if not inside.isdisjoint(i.consumers)),
        received=sum(v.size.at(size) for v in received),
        sent=sum(v.size.at(size) for v in sent),
        gradients_received=sum(v.size.at(size) for v in sent if v.needs_gradient),
        gradients_sent=sum(v.size.at(size) for v in received if v.needs_gradient),
        saved=float(saved.sum()),
        work=float(at_peak.max()),
        work_of_first=float((at_peak + after).max()),
    )


@pytest.mark.parametrize("seed", range(40))
def test_ranges_hold_what_the_stage_holds(seed: int) -> None:
    graph, rng = case(seed)
    n = len(graph.blocks)
    positions = sorted({0, n, *rng.sample(range(n), rng.randint(1, n))})
    costs = CostTable(make_profile(graph, rng)).at(3)
    tables = RangeTables(graph, positions)
    single = HoldingsOfRanges(tables, costs)
    ranges = single.all()
    for i in range(len(positions) - 1):
        for j in range(i + 1, len(positions)):
            stage = holdings_of_stage(graph, costs, range(positions[i], positions[j]))
            for name in Holdings.__dataclass_fields__:
                assert getattr(ranges, name)[i, j] == pytest.approx(getattr(stage, name)), (name, i, j)
                assert getattr(single.of(i, j), name) == getattr(ranges, name)[i, j], (name, i, j)


def test_a_value_is_relayed_from_user_to_user() -> None:
    """A value used by three later stages goes a -> b -> c, never a -> c."""
    graph = make_graph(6, num_skips=0)
    far = replace(graph.values[0], name="far", consumers=(2, 4))
    edges = Edges(replace(graph, values=(far,))).between(((0, 1), (2, 3), (4,), (5,)), 1)
    assert [(edge.source, edge.destination) for edge in edges] == [(0, 1), (1, 2)]


def test_the_peak_is_that_of_the_optimizer_step_if_it_needs_more_than_micro_batches() -> None:
    """It needs its temporaries when no micro-batch is there any more; for all parameters at once, or one by one."""
    held = Holdings(10.0, 10.0, 4.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, saved=3.0, work=5.0)
    plain, state = most(MemoryModel(2.0), held, 1), 10 + 1 + 3 * 10
    assert plain > state + 10
    assert most(MemoryModel(2.0, work_of_largest=1.0), held, 1) == plain
    assert most(MemoryModel(2.0, work_of_largest=20.0), held, 1) == state + 80
    assert most(MemoryModel(2.0, work_of_all=5.0, work_of_largest=20.0), held, 1) == state + 50 + 80
    assert most(MemoryModel(2.0, needs_gradient=False, work_of_all=50.0), held, 1) < plain


def peak_by_hand(saved: Array, work: Array, gradients: Array, in_flight: int, share: int) -> float:
    """Runs forwards and backwards of a stage, block by block, and returns the most that is held."""
    held = peak = 0.0
    made = np.zeros(len(saved), dtype=bool)
    forwards = backwards = 0
    while backwards < share:
        if forwards < min(backwards + in_flight, share):
            forwards, held = forwards + 1, held + float(saved.sum())
            peak = max(peak, held)
            continue
        backwards += 1
        for k in reversed(range(len(saved))):
            peak = max(peak, held + float(gradients[made].sum() + work[k]))
            made[k], held = True, held - float(saved[k])
    return max(peak, float(gradients.sum()))


@pytest.mark.parametrize("seed", range(40))
def test_the_peak_is_that_of_a_step_done_by_hand(seed: int) -> None:
    """Gradients come with the first backward; if it waits for all forwards, they and all forwards never meet."""
    graph, rng = case(seed)
    n = len(graph.blocks)
    saved, work = (np.array([float(rng.randint(0, 50)) for _ in range(n)]) for _ in range(2))
    costs = replace(CostTable(make_profile(graph, rng)).at(1), saved_bytes=saved, work_bytes=work)
    held = holdings_of_stage(graph, costs, range(n))
    held = replace(held, received=0.0, inputs=0.0, sent=0.0, gradients_received=0.0, gradients_sent=0.0)
    model = MemoryModel(0.0)
    fixed, share = held.parameters + held.buffers, rng.randint(1, 4)
    for in_flight in range(1, share + 1):
        peak = fixed + peak_by_hand(saved, work, gradient_bytes(graph, graph.parameters), in_flight, share)
        predicted = most(model, held, in_flight, share)
        in_optimizer = model.of_stage(held, needs_recompute=False).least
        assert predicted == pytest.approx(max(peak, in_optimizer)) or in_flight == share > 1
        assert max(peak, in_optimizer) - 1e-6 <= predicted <= most(model, held, in_flight) + 1e-6


def test_tied_parameters_count_once_with_an_accumulator_for_each_use() -> None:
    graph = make_graph(4, num_tied=1)
    tied = next(p for p in graph.parameters if p.name == "tied0")
    held = holdings_of_stage(graph, CostTable(make_profile(graph)).at(1), range(4))
    assert held.parameters == sum(p.num_bytes for p in graph.parameters)
    assert held.tied == 2 * tied.num_bytes
    assert held.tied_once == tied.num_bytes
    assert MemoryModel(0.0).fixed(held) == 2 * held.parameters + held.buffers + tied.num_bytes
    assert np.isclose(held.trained, held.parameters)


def test_samples_that_a_rank_has_memory_for_are_those_in_flight_and_what_the_limit_leaves_free() -> None:
    """Once, a look at a step ran up to 16 samples at once on a rank that was planned for one or two."""
    known = BlockBytes(2, saved_bytes=(30.0, 10.0, 60.0), work_bytes=(0.0,) * 3, process_bytes=100.0, fragmentation=2.0)
    first = StagePlan((0, 1), (0,), needs_recompute=False, in_flight=2, memory_bytes=1000.0)
    last = StagePlan((2,), (1,), needs_recompute=False, in_flight=4, memory_bytes=500.0)
    plan = Plan((first, last), 2, 4, 2.0, "1f1b", block_bytes=known)
    assert [plan.samples_inside(0, limit) for limit in (500.0, 900.0, 980.0)] == [4.0, 4.0, 4.0 + 80 / 40]
    assert plan.samples_inside(1, 460.0) == 3 * 2 + 60 / 60  # with all four in flight there are no gradients yet
    kept = replace(plan, stages=(replace(first, needs_recompute=True), last))
    assert kept.samples_inside(0, 0.0) == 2.0
    assert replace(plan, block_bytes=None).samples_inside(0, 0.0) == math.inf
