"""Predicts what the heap of a rank takes, holes and all: its instructions, tensor by tensor, on a model of the heap."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

from autovaruna.graph.records import Graph
from autovaruna.planner.costs import Costs
from autovaruna.planner.memory.chances import CHANCES, Chance
from autovaruna.planner.memory.handed_out import HandedOut, handed_out
from autovaruna.planner.memory.heap import Heap
from autovaruna.planner.memory.holdings import Holdings
from autovaruna.planner.memory.known_memory import KnownMemory
from autovaruna.planner.memory.lent import SharedBytes, lent_of_stages, shared_bytes
from autovaruna.planner.memory.rank_heap import RankHeap
from autovaruna.planner.memory.stage_memory import MemoryModel
from autovaruna.planner.memory.stage_tensors import StageTensors
from autovaruna.planner.records import Plan
from autovaruna.schedule import Instruction, Kind, Schedule
from autovaruna.schedule.slices import even_sizes, slices

_NUM_STEPS = 3
"""The first step leaves the optimizer's state in the heap, between holes; then a step is like the one before it."""
_MODEL_SHARE = 1 / 3
"""The ``heap_share`` of heaps that are as the model says; the holes of others are greater as that is."""
_MOST_BLOCKS = 20_000
"""Blocks that run forward or backward in a step; with more, to find the holes would take longer than to plan."""
_CHANCE = 0.02
"""What nothing knows, over what tensors hold at most: messages come when they come, and small pieces lie where they
lie. Less would be as often too little as too much."""

Holes = Callable[[Sequence[Instruction], Collection[int], range, float], float]
"""Returns the bytes of a rank, from its instructions, its stages, the micro-batches whose inputs are slices of its own
mini-batch, and what it would hold without holes."""


def finder_of_holes(
    graph: Graph,
    plan: Plan,
    costs: Costs,
    model: MemoryModel,
    held: Sequence[Holdings[float]],
    schedule: Schedule,
    known: KnownMemory | None = None,
) -> Holes | None:
    """Returns what finds the holes in the heap of a rank of a plan; None where there is no heap, or a step is long.

    Args:
        graph: what was planned.
        plan: the plan.
        costs: of the blocks, at the size of the greatest micro-batch.
        model: the rules of memory.
        held: what its stages hold.
        schedule: the instructions of all ranks.
        known: what other plans of the same problem have asked for.
    """
    known = known or KnownMemory()
    share, factor = model.heap_share, model.optimizer_bytes_factor
    num_blocks = 2 * plan.num_micro_batches * sum(len(stage.blocks) for stage in plan.stages)
    if not share or not plan.needs_gradient or num_blocks > _MOST_BLOCKS:
        return None
    tensors = [known.tensors_of(graph, costs, stage.blocks) for stage in plan.stages]
    num_groups = plan.num_ranks if model.has_own_inputs else 1
    sizes = _uneven_sizes(plan, num_groups) if costs.table else []
    of_sizes = cache(lambda: _tensors_by_size(graph, plan, costs, sizes, known))
    is_one_host = not plan.host_of
    shared = shared_bytes(graph, plan, tensors) if is_one_host else [SharedBytes()] * plan.num_stages
    program_of = {instruction.stage: program for program in schedule for instruction in program}

    def find(program: Sequence[Instruction], stages: Collection[int], own_micro_batches: range, peak: float) -> float:
        own = {stage: tensors[stage] for stage in stages}
        is_rank = is_one_host and own_micro_batches.step == plan.num_ranks  # else it stands for several, or has all
        inputs = handed_out(plan, tensors, own_micro_batches.start) if is_rank else HandedOut()

        def make() -> Heap:
            rest = program, own, factor, model.work_of_largest, own_micro_batches, is_one_host, inputs
            heaps = [heap_of_steps(*rest, chance, of_sizes()) for chance in CHANCES]
            return sorted(heaps, key=lambda heap: heap.hole_bytes)[len(heaps) // 2]

        heap = known.heap_of(plan, program, stages, own_micro_batches, inputs, make)
        lasting = model.process_bytes + sum(held[stage].parameters + held[stage].buffers for stage in stages)
        own_program = dict.fromkeys(stages, program)
        sent = lent_of_stages([shared[stage].sent for stage in stages], own_program) + inputs.shared_bytes
        received = lent_of_stages([shared[stage].received for stage in stages], program_of)
        whole = lasting + heap.peak_bytes + sent + received
        # Of several stages, the messages of each are in `peak`, but are not there together; it knows of none twice.
        # Where micro-batches differ in size, it takes all for the mean.
        if not sizes:
            whole = min(peak + sent, whole) if len(stages) > 1 else max(peak, whole)
        return whole + share / _MODEL_SHARE * heap.hole_bytes + _CHANCE * heap.peak_bytes

    return find


def _uneven_sizes(plan: Plan, num_groups: int) -> list[int]:
    """Returns the samples of each micro-batch, if ranks that pass fewer of them have larger ones."""
    num_micro_batches = plan.num_micro_batches
    if not num_micro_batches % num_groups or num_micro_batches < num_groups:
        return []
    samples = round(plan.micro_batch_size * num_micro_batches)
    return [size for _, size in slices(even_sizes(samples, num_groups), num_micro_batches)]


def _tensors_by_size(
    graph: Graph, plan: Plan, costs: Costs, sizes: Sequence[int], known: KnownMemory
) -> dict[int, list[StageTensors]]:
    """Returns the tensors of the stages for each micro-batch."""
    at = {size: costs.table.at(size) for size in set(sizes)} if costs.table else {}
    tensors = {size: [known.tensors_of(graph, at[size], stage.blocks) for stage in plan.stages] for size in at}
    return {m: tensors[size] for m, size in enumerate(sizes)}


def heap_of_steps(
    program: Sequence[Instruction],
    stages: Mapping[int, StageTensors],
    state_factor: float,
    work_of_largest: float,
    own_micro_batches: Collection[int] = (),
    shares: bool = False,
    inputs: HandedOut | None = None,
    chance: Chance | None = None,
    sized: Mapping[int, Sequence[StageTensors]] | None = None,
) -> Heap:
    """Returns the heap of a rank after some steps.

    Args:
        program: the instructions of the rank, in order.
        stages: the tensors of its stages.
        state_factor: bytes of optimizer state for each byte of a trained parameter.
        work_of_largest: bytes that the optimizer's step needs while it is at a parameter, for each of its bytes.
        own_micro_batches: those whose inputs are slices of the rank's own mini-batch.
        shares: whether messages come in memory that ranks share.
        inputs: where those of other micro-batches lie.
        chance: what small pieces each block makes, and what is free at the beginning.
        sized: the same as `stages` for micro-batches of other sizes.
    """
    recomputing = {each.stage for each in program if each.kind is Kind.RECOMPUTE}
    rank = RankHeap(stages, recomputing, own_micro_batches, shares, inputs, chance, sized)
    for step in range(_NUM_STEPS):
        rank.run(program)
        rank.update(state_factor if step == 0 else 0.0, work_of_largest)
    return rank.heap
