"""Memory that ranks of a host share: in no rank's heap, and resident in both processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autovaruna.planner.memory.handed_out import HandedOut, handed_out
from autovaruna.planner.memory.holes import heap_of_steps
from autovaruna.planner.memory.lent import (
    COPIED_BYTES,
    LENT_BYTES,
    MAX_BYTES,
    Lent,
    SharedBytes,
    is_lent,
    lent_of_stages,
    shared_bytes,
)
from autovaruna.planner.memory.stage_tensors import StageTensors, tensors_of_stage
from autovaruna.planner.search import make_plan
from tests.planner.cases import make_problem
from tests.planner.test_heap_model import ALTERNATING, program_of

MIB = float(1 << 20)


def test_only_middling_tensors_are_lent() -> None:
    assert [is_lent(size) for size in (0, COPIED_BYTES, COPIED_BYTES + 1, MAX_BYTES, MAX_BYTES + 1)] == [
        *(False, False, True, True, False)
    ]


@pytest.mark.parametrize(("num_bytes", "most"), [(MIB, 0), (float(COPIED_BYTES), 2), (float(MAX_BYTES + 64), 3)])
def test_what_comes_through_shared_memory_is_not_posted_ahead(num_bytes: float, most: int) -> None:
    """Two micro-batches are in flight at most; a receive that is posted for the next ones is a third."""
    stage = {0: StageTensors((), {0: num_bytes}, {})}
    program = program_of("F0 B0 F1 B1 F2 F3 B2 B3")
    posted, shared = (heap_of_steps(program, stage, 0.0, 0.0, (), shares) for shares in (False, True))
    assert (posted.peak_bytes, shared.peak_bytes) == (3 * num_bytes, most * num_bytes)
    assert posted.live_bytes == shared.live_bytes == 0.0


def test_a_gradient_with_holes_is_copied_out_of_shared_memory() -> None:
    """It lies there without them, and is computed with as the sender had it."""
    stage = {0: StageTensors((), {}, {0: MIB}, {0: 1.75 * MIB})}
    assert heap_of_steps(program_of("F0 B0"), stage, 0.0, 0.0, (), True).peak_bytes == 1.75 * MIB


def test_what_finds_no_room_in_shared_memory_lies_in_the_heap() -> None:
    """All micro-batches are in flight, as with gpipe: two more than there is room for are copied out."""
    stage, count = {0: StageTensors((), {0: float(MAX_BYTES)}, {})}, LENT_BYTES // MAX_BYTES + 2
    program = " ".join(f"{kind}{m}" for kind in "FB" for m in range(count))
    heap = heap_of_steps(program_of(program), stage, 0.0, 0.0, (), True)
    assert (heap.peak_bytes, heap.live_bytes) == (2 * MAX_BYTES, 0)


def test_inputs_of_the_model_lie_in_the_heap() -> None:
    """They are no messages of a cut."""
    inputs = {0: StageTensors((), {-1: MIB}, {})}
    assert heap_of_steps(ALTERNATING, inputs, 0.0, 0.0, (), True).peak_bytes == 2 * MIB


def test_both_ranks_share_what_is_in_flight() -> None:
    problem = make_problem(6, num_stages=2, schedule="1f1b")
    plan = make_plan(problem)
    costs = problem.cost_table.at(plan.micro_batch_size)
    tensors = [tensors_of_stage(problem.graph, costs, stage.blocks) for stage in plan.stages]
    (v,) = (v for v in tensors[1].received if v >= 0)
    assert problem.graph.values[v].needs_gradient

    def shared(num_bytes: float, in_flight: int) -> list[SharedBytes]:
        last = replace(tensors[1], received={v: num_bytes})
        deep = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], in_flight=in_flight)))
        return shared_bytes(problem.graph, replace(deep, num_micro_batches=8), [tensors[0], last])

    forward, back = Lent(2 * MIB, MIB, 0, {0: MIB}), Lent(0, 0, 2 * MIB)
    assert shared(MIB, 2) == [SharedBytes(forward, back), SharedBytes(back, forward)]
    forward, back = Lent(LENT_BYTES, 0, 0, {0: 4 * MIB}), Lent(0, 0, 8 * MIB)
    assert shared(4 * MIB, 8) == [SharedBytes(forward, back), SharedBytes(back, forward)]
    assert shared(100.0, 2) == [SharedBytes(), SharedBytes()]


def test_a_rank_shares_no_more_than_lies_there_at_once() -> None:
    """What the senders of both have in flight together, which the first two have not both at their most."""
    one, two = Lent(2, 1, 2, {0: 1}), Lent(3, 2, 1, {2: 1})
    both = program_of("F0 F1 F2"), [replace(each, stage=2) for each in program_of("F0 F1 F2 B0 B1 B2")]
    deep = {0: program_of("F0 F1 F2 F3"), 2: program_of("F0") + both[1][:3] * 2}
    assert lent_of_stages([one], deep) == 2 + 1 + 2
    assert lent_of_stages([one, two], deep) == 4 + 3 + 2
    assert lent_of_stages([one, two], dict.fromkeys((0, 2), both[0] + both[1])) == 6 + 2
    alternating = [each for pair in zip(program_of("F0 B0 F1"), both[1][:3], strict=True) for each in pair]
    assert lent_of_stages([one, two], dict.fromkeys((0, 2), alternating)) == 4 + 2


@pytest.mark.parametrize(
    ("num_bytes", "lent", "copied"), [(MIB, 4, 0), (8 * MIB, 3, 1), (100.0, 0, 0), (9 * MIB, 0, 0)]
)
def test_samples_of_others_are_there_when_a_step_begins(num_bytes: float, lent: int, copied: int) -> None:
    """Those of the first rank's four micro-batches come to the last stage at once, as far as they are lent first."""
    plan = replace(make_plan(make_problem(6, num_stages=2, schedule="1f1b")), num_micro_batches=8)
    tensors = [StageTensors((), {}, {}), StageTensors((), {-1: num_bytes}, {})]
    (first,), (last,) = (stage.ranks for stage in plan.stages)
    there, here = handed_out(plan, tensors, last), handed_out(plan, tensors, first)
    assert (len(there.lent), len(there.copied)) == (lent, copied) and not here.lent | here.copied.keys()
    assert there.shared_bytes == here.shared_bytes == (lent + copied) * num_bytes


def test_a_copy_of_an_input_waits_in_the_heap() -> None:
    """The second micro-batch's is there while the first one runs; what is lent is in nobody's heap."""
    inputs = {0: StageTensors((), {-1: MIB}, {})}
    program = program_of("F0 B0 F1 B1")
    copied = HandedOut(copied={(0, 0, -1): MIB, (0, 1, -1): MIB})
    lent = HandedOut(lent={(0, 0, -1), (0, 1, -1)})
    peaks = [heap_of_steps(program, inputs, 0.0, 0.0, (), True, each).peak_bytes for each in (None, copied, lent)]
    assert peaks == [MIB, 3 * MIB, 0.0]
