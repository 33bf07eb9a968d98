"""The model of the heap: its laws, and the holes that it finds in plans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from autovaruna.planner.memory import holes, rank_heap
from autovaruna.planner.memory.block_steps import BlockSteps, steps_of_block
from autovaruna.planner.memory.chances import CHANCES, Chance
from autovaruna.planner.memory.heap import MAPPED_BYTES, Heap
from autovaruna.planner.memory.holdings import holdings_of_stage
from autovaruna.planner.memory.holes import heap_of_steps
from autovaruna.planner.memory.stage_memory import MemoryModel
from autovaruna.planner.memory.stage_tensors import BlockTensors, StageTensors, tensors_of_stage
from autovaruna.planner.predicting.orders import Orders
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.profiler.records import Sequences
from autovaruna.schedule import Instruction, Kind
from tests.planner.cases import make_problem


@pytest.mark.parametrize("seed", range(8))
def test_nothing_overlaps_and_all_free_is_one_piece(seed: int) -> None:
    """Tensors lie at multiples of 64; what nothing lies in is used before the heap grows."""
    chance, heap = random.Random(seed), Heap()
    used: dict[int, int] = {}
    tensors: set[int] = set()
    for _ in range(300):
        if used and chance.random() < 0.45:
            begin = chance.choice(list(used))
            heap.give(begin)
            del used[begin]
            tensors.discard(begin)
        elif chance.random() < 0.5:
            size = chance.randint(1, 2000)
            used[place := heap.take(size)] = size
            tensors.add(place)
        else:
            size = chance.randint(1, 200)
            used[heap.take_small(size)] = size
        spans = sorted((begin, begin + size) for begin, size in used.items())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(begin % 64 == 0 for begin in tensors)
        assert heap.live_bytes == sum(used[begin] for begin in tensors) <= heap.peak_bytes <= heap.num_bytes
    for begin in used:
        heap.give(begin)
    before = heap.num_bytes
    assert heap.take(before - 200) == 64 and heap.num_bytes == before


def test_no_tensor_fits_where_one_of_its_size_has_been() -> None:
    """Not even one of a few bytes less: what glibc looks for to align it is more than what lies between two."""
    heap = Heap()
    _, second, third = (heap.take(4096) for _ in range(3))
    heap.give(second)
    assert heap.take(4096) > third and heap.take(4090) > third
    assert heap.take(4080) == second


def test_sizes_that_glibc_rounds_to_the_right_ones_fit_again() -> None:
    """Where a tensor has 32 bytes more than a multiple of 64, what is between it and the next one is large enough."""
    heap = Heap()
    _, second, _ = (heap.take(4096 + 32) for _ in range(3))
    heap.give(second)
    assert heap.take(4096 + 32) == second


def test_a_small_piece_keeps_a_tensor_out_of_a_hole() -> None:
    """It lies in the smallest hole, which then is too small; when it is gone, the hole is whole again."""
    heap = Heap()
    first, _ = heap.take(8192), heap.take(4096)
    heap.give(first)
    small = heap.take_small(500)
    assert heap.take(8000) > first
    heap.give(small)
    assert heap.take(8000) == first


def test_a_small_piece_is_cut_from_what_the_last_one_has_left() -> None:
    """Even where a smaller hole has room for it: so glibc has it, if nothing else has become free meanwhile."""
    heap = Heap()
    large, _, little, _ = heap.take(8192), heap.take_small(24), heap.take_small(800), heap.take_small(24)
    heap.give(large)
    heap.give(little)
    first = heap.take_small(900)
    assert first < little and heap.take_small(500) == first + 912


def test_what_is_free_at_first_is_used_before_the_heap_grows_and_counts_as_far_as_it_was_used() -> None:
    heap = Heap([10_000, 100_000])
    assert heap.num_bytes == 0
    large, small = heap.take(50_000), heap.take(5_000)
    assert 55_000 < heap.num_bytes < 56_000
    end = heap.take(80_000)
    assert end < min(large, small) and 135_000 < heap.num_bytes < 136_000
    for each in (large, small, end):
        heap.give(each)
    before = heap.num_bytes
    assert (heap.take(49_000), heap.take(4_000), heap.take(79_000)) == (large, small, end)
    assert heap.num_bytes == before and heap.peak_bytes == 135_000


def stage_of(num_blocks: int, num_bytes: float) -> StageTensors:
    """A stage each of whose blocks keeps what it makes, and makes a gradient for what it reads."""
    reads = [{k - 1: num_bytes} if k else {} for k in range(num_blocks)]
    blocks = (BlockTensors({k: num_bytes}, frozenset({k}), (), 0.0, reads[k], (), 0.0, ()) for k in range(num_blocks))
    return StageTensors(tuple(blocks), {}, {num_blocks - 1: num_bytes})


def program_of(text: str) -> list[Instruction]:
    """Returns the instructions of a stage: F and B with the micro-batch."""
    return [Instruction(0, Kind.FORWARD if each[0] == "F" else Kind.BACKWARD, int(each[1])) for each in text.split()]


ALTERNATING = program_of("F0 F1 B0 F2 B1 F3 B2 B3")


def test_equal_tensors_leave_holes_where_micro_batches_alternate() -> None:
    heap = heap_of_steps(ALTERNATING, {0: stage_of(6, 1e6)}, 0.0, 0.0)
    assert heap.peak_bytes >= 2 * 6e6
    assert 0 < heap.hole_bytes < heap.peak_bytes


def test_what_the_optimizer_needs_for_a_tensor_are_tensors_of_its_size() -> None:
    """Together they would be mapped; each by itself lies in the heap, and so does each piece of its state."""
    size = 0.75 * MAPPED_BYTES
    stage = StageTensors((BlockTensors({}, frozenset(), (), 0.0, {}, (size,), 0.0, (size,)),), {}, {})
    heap = heap_of_steps(program_of("F0 B0"), {0: stage}, 1.0, 2.0)
    assert heap.peak_bytes == pytest.approx((1 + 1 + 2) * size)


def test_tensors_that_are_mapped_leave_none() -> None:
    """They are in use all the same; only small pieces lie in the heap."""
    heap = heap_of_steps(ALTERNATING, {0: stage_of(6, float(MAPPED_BYTES))}, 0.0, 0.0)
    assert heap.mapped_bytes == heap.peak_bytes >= 2 * 6 * MAPPED_BYTES
    assert heap.num_bytes == heap.hole_bytes < MAPPED_BYTES


def test_small_pieces_of_blocks_that_wait_make_holes_greater() -> None:
    stage = {0: stage_of(6, 1.1e6)}
    without = heap_of_steps(ALTERNATING, stage, 0.0, 0.0, chance=Chance((), ()))
    for each in CHANCES:
        chance = replace(each, free_bytes=())
        assert without.hole_bytes < heap_of_steps(ALTERNATING, stage, 0.0, 0.0, chance=chance).hole_bytes


def test_what_a_backward_lists_keeps_large_tensors_out_of_what_the_last_one_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first blocks make the largest tensors: their backward, the last, needs room where small ones have been."""
    sizes = [6e6, 6e6, 3e6, 3e6, 1.5e6, 1.5e6, 0.7e6, 0.7e6]
    reads = [{}, *({k: size} for k, size in enumerate(sizes[:-1]))]
    blocks = [
        BlockTensors({k: size}, frozenset({k}), (), 0.0, reads[k], (), 2 * size, ()) for k, size in enumerate(sizes)
    ]
    stage = {0: StageTensors(tuple(blocks), {}, {7: sizes[-1]})}

    chances = [replace(each, free_bytes=()) for each in CHANCES]

    def hole_bytes() -> list[int]:
        heaps = [heap_of_steps(program_of("F0 B0 F1 B1"), stage, 0.0, 0.0, chance=chance) for chance in chances]
        assert all(not heap.live_bytes for heap in heaps)
        return sorted(heap.hole_bytes for heap in heaps)

    listed = hole_bytes()
    monkeypatch.setattr(rank_heap, "LISTED", ())
    assert hole_bytes()[1] < listed[1]


def test_holes_are_the_median_of_those_of_some_chances(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(6, 2, 8, num_stages=2, num_micro_batches=4)
    problem = replace(problem, cluster=replace(problem.cluster, heap_share=1 / 3))

    def needed(chances: Sequence[Chance]) -> tuple[float, ...]:
        monkeypatch.setattr(holes, "CHANCES", chances)
        return make_plan(problem).rank_bytes()

    few, many = Chance((), ()), Chance(((4096, True),) * 100, ())
    usual, most = needed([few]), needed([many])
    assert usual < most
    assert needed([many, few, few]) == needed([few, few, many]) == usual


def test_what_forward_needs_while_it_runs_lies_between_tensors() -> None:
    stage = stage_of(6, 1e6)
    needy = replace(stage, blocks=tuple(replace(block, forward_work=3e6) for block in stage.blocks))
    plain, more = (heap_of_steps(ALTERNATING, {0: each}, 0.0, 0.0) for each in (stage, needy))
    assert plain.num_bytes < more.num_bytes and plain.live_bytes == more.live_bytes == 0


def recorded(forward: tuple[int, ...], backward: tuple[int, ...]) -> dict[int, StageTensors]:
    """A stage of one block that makes a megabyte and keeps it, with what was recorded of it."""
    made, read = {0: 1e6}, {-1: 1e6}
    steps = steps_of_block(Sequences(forward, backward), made, read, [5e5])
    block = BlockTensors(made, frozenset({0}), (), 0.0, read, (5e5,), 0.0, (5e5,), 9e6, steps)
    return {0: StageTensors((block,), {}, {})}


@pytest.mark.parametrize(
    ("forward", "backward", "peak"),
    [
        ((1_000_000,), (1_000_000, 500_000), 2.5e6),
        ((2_000_000, 3_000_000, -1, 1_000_000, -2), (1_000_000, 500_000), 5e6),
        ((1_000_000, 700_000), (1_000_000, 500_000), 3.2e6),
        ((1_000_000, 700_000), (-2, 1_000_000, 500_000), 2.5e6),
        ((1_000_000,), (4_000_000, -2, 1_000_000, 500_000), 5e6),
    ],
    ids=["no more than tensors", "copies of a kernel", "what is kept", "given back at once", "copies of its backward"],
)
def test_what_was_recorded_is_taken_step_by_step(
    forward: tuple[int, ...], backward: tuple[int, ...], peak: float
) -> None:
    """In place of lumps (here 9 MB that no step takes); at the end nothing is left."""
    heap = heap_of_steps(program_of("F0 B0"), recorded(forward, backward), 0.0, 0.0)
    assert (heap.peak_bytes, heap.live_bytes) == (peak, 0)


def test_a_gradient_that_no_step_takes_is_that_of_what_was_made() -> None:
    """As of a sum, which passes on what has come: nothing is taken for it, and what waits for it has its memory."""
    stage = recorded((1_000_000,), ())[0]
    stages = {0: replace(stage, gradients_received={0: 1e6})}
    assert heap_of_steps(program_of("F0 B0"), stages, 0.0, 0.0).peak_bytes == 2e6


def test_slices_of_a_gradient_take_nothing_and_keep_all_of_it() -> None:
    """Of two values that are joined: both slices lie in the gradient that comes, until the last of them is gone."""
    joined = steps_of_block(Sequences((2_000_000,), (), (-1, -1), (1_900_000,) * 2), {2: 2e6}, {0: 1e6, 1: 1e6}, [])
    last = BlockTensors({2: 2e6}, frozenset({2}), (), 0.0, {0: 1e6, 1: 1e6}, (), 0.0, (), 0.0, joined)
    first, second = (BlockTensors({v: 1e6}, frozenset({v}), (), 0.0, {}, (), 0.0, ()) for v in (0, 1))
    stages = {0: StageTensors((first, second, last), {}, {2: 2e6})}
    heap = heap_of_steps(program_of("F0 B0"), stages, 0.0, 0.0)
    assert (heap.peak_bytes, heap.live_bytes) == (2e6 + 2e6 + 2e6, 0)


@pytest.mark.parametrize(("spans", "shares", "peak"), [({}, False, 4e6), ({0: 1.5e6}, False, 4.5e6), ({}, True, 3e6)])
def test_a_gradient_that_has_come_is_not_added_to(spans: dict[int, float], shares: bool, peak: float) -> None:
    """It is the message's: what is added to it makes a third, wherever it lies."""
    stage = stage_of(1, 1e6)
    more = BlockTensors({}, frozenset(), (), 0.0, {0: 1e6}, (), 0.0, ())
    stages = {0: StageTensors((*stage.blocks, more), {}, {0: 1e6}, spans)}
    assert heap_of_steps(program_of("F0 B0"), stages, 0.0, 0.0, shares=shares).peak_bytes == peak


def test_what_backward_starts_from_is_there_until_it_ends() -> None:
    """What a stage has sent, and the gradient that has come for it, while its first block needs most."""
    stage = stage_of(2, 1e6)
    needy = replace(stage.blocks[0], work=3e6)
    heap = heap_of_steps(program_of("F0 B0"), {0: replace(stage, blocks=(needy, stage.blocks[1]))}, 0.0, 0.0)
    assert (heap.peak_bytes, heap.live_bytes) == (2e6 + 2e6 + 3e6, 0)


def test_each_micro_batch_takes_as_much_as_it_is_large() -> None:
    stage, large = stage_of(2, 1e6), stage_of(2, 2e6)
    heap = heap_of_steps(program_of("F0 F1 B0 B1"), {0: stage}, 0.0, 0.0, sized={1: [large]})
    assert (heap.peak_bytes, heap.live_bytes) == (2e6 + 3 * 2 * 2e6 - 2 * 2e6, 0)


def test_the_last_stage_holds_the_greatest_of_uneven_micro_batches() -> None:
    """Of three, that of the rank that passes one is twice as large as those of the rank that passes two."""
    problem = make_problem(6, 2, 12, num_stages=2, num_micro_batches=3)
    problem = replace(problem, cluster=replace(problem.cluster, heap_share=1 / 3))
    even, uneven = (make_plan(replace(problem, min_micro_batches_for_inputs=count)) for count in (1, 2))
    assert even.stages == uneven.stages
    last = even.stages[-1].ranks[0]
    assert uneven.rank_bytes()[last] > even.rank_bytes()[last]


def test_what_waits_for_weight_gradients_is_there_until_they_are_computed() -> None:
    stage = stage_of(1, 1e6)
    split = {0: replace(stage, blocks=(replace(stage.blocks[0], deferred=3e6),))}
    waits = [Instruction(0, Kind.WEIGHT, m) for m in (0, 1)]
    one, two = program_of("F0 B0"), program_of("F1 B1")
    at_once, later = [*one, waits[0], *two, waits[1]], [*one, *two, *waits]
    assert [heap_of_steps(each, split, 0.0, 0.0).peak_bytes for each in (one, at_once, later)] == [2e6, 3e6 + 1e6, 6e6]


def test_a_gradient_that_two_share_is_not_added_to() -> None:
    """Of x + f(x) + y: f's gradient meets the shared one, and neither may change, so that their sum is a third."""
    made, all_three = {1: 1e6}, {0: 1e6, 2: 1e6, 3: 1e6}
    last = BlockTensors(made, frozenset({1}), (), 0.0, all_three, (), 0.0, (), 0.0, recorded_steps(made, all_three))
    middle = BlockTensors({2: 1e6}, frozenset({2}), (), 0.0, {0: 1e6}, (), 0.0, (), 0.0)
    first = BlockTensors({0: 1e6, 3: 1e6}, frozenset({0, 3}), (), 0.0, {}, (), 0.0, ())
    stages = {0: StageTensors((first, middle, last), {}, {1: 1e6})}
    heap = heap_of_steps(program_of("F0 B0"), stages, 0.0, 0.0)
    assert (heap.peak_bytes, heap.live_bytes) == (4e6 + 3e6, 0)


def recorded_steps(made: dict[int, float], read: dict[int, float]) -> BlockSteps | None:
    """Of a sum: it makes its value, and takes nothing backward."""
    return steps_of_block(Sequences((1_000_000,), ()), made, read, [])


def test_inputs_are_received_unless_they_are_the_ranks_own() -> None:
    inputs = StageTensors((), {-1: 1e6}, {})
    assert heap_of_steps(program_of("F0 F1 B0 B1"), {0: inputs}, 0.0, 0.0).peak_bytes == 2e6
    assert heap_of_steps(program_of("F0 F1 B0 B1"), {0: inputs}, 0.0, 0.0, [1]).peak_bytes == 1e6


def test_a_stage_that_recomputes_holds_one_micro_batch() -> None:
    program = [step for each in ALTERNATING for step in recomputed(each)]
    stage = {0: stage_of(6, 1e6)}
    assert (
        heap_of_steps(program, stage, 0.0, 0.0).peak_bytes
        < 2 * 6e6
        <= heap_of_steps(ALTERNATING, stage, 0.0, 0.0).peak_bytes
    )


def recomputed(step: Instruction) -> list[Instruction]:
    """Returns an instruction, after a recompute if it goes backward."""
    return [replace(step, kind=Kind.RECOMPUTE), step] if step.kind is Kind.BACKWARD else [step]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble"])
def test_a_step_gives_back_all_that_it_takes(schedule: str, recompute: str, seed: int) -> None:
    """All but the state of the optimizer, here a byte for each byte of the parameters; once for a tied one."""
    num_stages = 4 if schedule == "interleaved" else 2
    problem = make_problem(8, seed=seed, skips=3, tied=1, schedule=schedule, recompute=recompute, num_stages=num_stages)
    plan = make_plan(problem)
    costs = problem.cost_table.at(plan.micro_batch_size)
    tensors = {s: tensors_of_stage(problem.graph, costs, stage.blocks) for s, stage in enumerate(plan.stages)}
    for rank, program in enumerate(Orders(plan, problem.graph).planned):
        own = {s: tensors[s] for s, stage in enumerate(plan.stages) if rank in stage.ranks}
        state = sum(int(each) for stage in own.values() for block in stage.blocks for each in block.stepped)
        assert heap_of_steps(program, own, 1.0, 1.0).live_bytes == state


def test_a_plan_on_a_heap_holds_more_than_one_without() -> None:
    problem = make_problem(8, num_stages=2, num_micro_batches=8, schedule="1f1b")
    holed = replace(problem, cluster=replace(problem.cluster, heap_share=0.3))
    plain, with_holes = make_plan(problem).rank_bytes(), make_plan(holed).rank_bytes()
    assert all(a < b < 2 * a for a, b in zip(plain, with_holes, strict=True))


def test_stages_of_one_rank_do_not_hold_their_messages_together() -> None:
    """What a rank with several stages holds is what they hold at once, and no more than what each may need."""
    problem = make_problem(8, num_stages=4, num_micro_batches=4, schedule="interleaved")
    holed = replace(problem, cluster=replace(problem.cluster, heap_share=1 / 3))
    plan = make_plan(holed)
    find = finder(plan, holed)
    for rank, program in enumerate(Orders(plan, problem.graph).planned):
        own = [s for s, stage in enumerate(plan.stages) if rank in stage.ranks]
        assert len(own) > 1
        assert find(program, own, range(0), 1e15) == find(program, own, range(0), 1e14) < 1e12


def finder(plan: Plan, problem: Problem) -> holes.Holes:
    """Returns what finds the holes of a plan's ranks."""
    costs, schedule = problem.cost_table.at(plan.micro_batch_size), Orders(plan, problem.graph).planned
    held = [holdings_of_stage(problem.graph, costs, stage.blocks) for stage in plan.stages]
    found = holes.finder_of_holes(problem.graph, plan, costs, MemoryModel(2.0, heap_share=1 / 3), held, schedule)
    assert found is not None
    return found


def test_each_rank_holds_its_own_process() -> None:
    problem = make_problem(8, num_stages=2, num_micro_batches=4, schedule="1f1b")
    own = replace(problem, cluster=replace(problem.cluster, own_process_bytes=(7e6, 1e6), process_bytes=4e6))
    alike = replace(problem, cluster=replace(problem.cluster, process_bytes=4e6))
    (first, second), (mean, other) = make_plan(own).rank_bytes(), make_plan(alike).rank_bytes()
    assert (first - mean, second - other) == (3e6, -3e6)
