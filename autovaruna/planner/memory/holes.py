"""Predicts what the heap of a rank takes, holes and all: its instructions, tensor by tensor, on a model of the heap."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from autovaruna.graph.records import Graph
from autovaruna.planner.costs import Costs
from autovaruna.planner.memory.heap import Heap
from autovaruna.planner.memory.holdings import Holdings
from autovaruna.planner.memory.stage_memory import MemoryModel
from autovaruna.planner.memory.stage_tensors import BlockTensors, StageTensors, tensors_of_stage
from autovaruna.planner.records import Plan
from autovaruna.schedule import Instruction, Kind

_NUM_STEPS = 3
"""The first step leaves the optimizer's state in the heap, between holes; then a step is like the one before it."""
_AHEAD = 4
"""Receives are posted for this instruction and the next few."""
_LEAST_BYTES = 1 << 6
_BEFORE: tuple[tuple[int, bool], ...] = ((16, False), (16, True), (16, False), (176, True), (96, False))
_AFTER: tuple[tuple[int, bool], ...] = ((16, False), (16, True), (480, False), (96, True), (16, False))
"""Bytes of small pieces that a block makes before and after its tensors, and whether they stay until its backward.

A node of autograd, with what describes its tensors, is some 15 pieces of 16 to 500 bytes in any model, half of them of
16 to 24. Those that stay keep tensors out of the holes that they lie in; those that go leave room for the next ones.
"""
_MODEL_SHARE = 1 / 3
"""The ``heap_share`` of heaps that are as the model says; the holes of others are greater as that is."""
_MOST_BLOCKS = 20_000
"""Blocks that run forward or backward in a step; with more, to find the holes would take longer than to plan."""
_CHANCE = 0.04
"""What nothing knows, over what tensors hold at most: messages come when they come, and small pieces lie where they
lie. Less would be as often too little as too much."""

Holes = Callable[[Sequence[Instruction], Collection[int], Collection[int], float], float]
"""Returns the bytes of a rank, from its instructions, its stages, the micro-batches whose inputs are slices of its own
mini-batch, and what it would hold without holes."""

Key = tuple[int, int, bool]
"""A stage, a micro-batch, and whether it goes forward."""


def finder_of_holes(
    graph: Graph, plan: Plan, costs: Costs, model: MemoryModel, held: Sequence[Holdings[float]]
) -> Holes | None:
    """Returns what finds the holes in the heap of a rank of a plan; None where there is no heap, or a step is long.

    Args:
        graph: what was planned.
        plan: the plan.
        costs: of the blocks, at the size of the greatest micro-batch.
        model: the rules of memory.
        held: what its stages hold.
    """
    share, factor = model.heap_share, model.optimizer_bytes_factor
    num_blocks = 2 * plan.num_micro_batches * sum(len(stage.blocks) for stage in plan.stages)
    if not share or not plan.needs_gradient or num_blocks > _MOST_BLOCKS:
        return None
    tensors = [tensors_of_stage(graph, costs, stage.blocks) for stage in plan.stages]

    def find(
        program: Sequence[Instruction], stages: Collection[int], own_micro_batches: Collection[int], peak: float
    ) -> float:
        own = {stage: tensors[stage] for stage in stages}
        heap = heap_of_steps(program, own, factor, model.work_of_largest, own_micro_batches)
        lasting = model.process_bytes + sum(held[stage].parameters + held[stage].buffers for stage in stages)
        if len(stages) > 1:  # the messages of each are in `peak`, but are not there together
            peak = min(peak, lasting + heap.peak_bytes)
        return peak + share / _MODEL_SHARE * heap.hole_bytes + _CHANCE * heap.peak_bytes

    return find


def heap_of_steps(
    program: Sequence[Instruction],
    stages: Mapping[int, StageTensors],
    state_factor: float,
    work_of_largest: float,
    own_micro_batches: Collection[int] = (),
) -> Heap:
    """Returns the heap of a rank after some steps.

    Args:
        program: the instructions of the rank, in order.
        stages: the tensors of its stages.
        state_factor: bytes of optimizer state for each byte of a trained parameter.
        work_of_largest: bytes that the optimizer's step needs while it is at a parameter, for each of its bytes.
        own_micro_batches: those whose inputs are slices of the rank's own mini-batch.
    """
    rank = _RankHeap(stages, {each.stage for each in program if each.kind is Kind.RECOMPUTE}, own_micro_batches)
    for step in range(_NUM_STEPS):
        rank.run(program)
        rank.update(state_factor if step == 0 else 0.0, work_of_largest)
    return rank.heap


class _RankHeap:
    """The heap of one rank while it runs instructions."""

    def __init__(
        self, stages: Mapping[int, StageTensors], recomputing: Collection[int], own_micro_batches: Collection[int]
    ) -> None:
        self.heap = Heap()
        self._stages = stages
        self._recomputing = recomputing
        self._own_micro_batches = own_micro_batches
        self._posted: dict[Key, dict[int, int]] = {}
        self._leaving: list[int] = []
        self._received: dict[tuple[int, int], list[int]] = {}
        self._kept: dict[tuple[int, int], list[list[int]]] = {}
        self._weights: dict[tuple[int, int], list[int]] = {}

    def run(self, program: Sequence[Instruction]) -> None:
        """Runs the instructions of a step."""
        for place, instruction in enumerate(program):
            for following in program[place : place + _AHEAD]:
                self._post(following)
            sent, self._leaving = self._leaving, []
            self._run(instruction)
            self._give(sent)
        self._give(self._leaving)
        self._leaving = []

    def update(self, state_factor: float, work_of_largest: float) -> None:
        """Runs the optimizer's step, which makes its state if there is none yet, and lets go of the gradients."""
        for stage, k in self._weights:
            for num_bytes in self._stages[stage].blocks[k].stepped:
                self._take_alike(num_bytes, state_factor)
                self._give(self._take_alike(num_bytes, work_of_largest))
        for gradients in self._weights.values():
            self._give(gradients)
        self._weights.clear()

    def _post(self, instruction: Instruction) -> None:
        is_forward = instruction.kind is Kind.FORWARD
        key = instruction.stage, instruction.micro_batch, is_forward
        if key in self._posted or instruction.kind not in (Kind.FORWARD, Kind.BACKWARD):
            return
        stage = self._stages[instruction.stage]
        awaited = stage.received if is_forward else stage.gradients_received
        if instruction.micro_batch in self._own_micro_batches:
            awaited = {v: num_bytes for v, num_bytes in awaited.items() if v >= 0}
        self._posted[key] = {v: place for v, each in awaited.items() for place in self._take(each)}

    def _run(self, instruction: Instruction) -> None:
        stage, key = self._stages[instruction.stage], (instruction.stage, instruction.micro_batch)
        if instruction.kind is Kind.FORWARD:
            self._received[key] = list(self._posted.pop((*key, True)).values())
        if instruction.kind in (Kind.FORWARD, Kind.RECOMPUTE):
            kept = self._forward(stage)
            if instruction.kind is Kind.FORWARD and instruction.stage in self._recomputing:
                self._give(place for places in kept for place in places)
            else:
                self._kept[key] = kept
        if instruction.kind is Kind.BACKWARD:
            self._backward(instruction.stage, self._posted.pop((*key, False)), self._kept.pop(key))
            self._give(self._received.pop(key))

    def _forward(self, stage: StageTensors) -> list[list[int]]:
        """Returns where lies what each block keeps."""
        passing: dict[int, list[int]] = {}
        kept = []
        for block in stage.blocks:
            small, work = self._take_small(_BEFORE), self._take(block.forward_work)
            places = {v: self._take(num_bytes) for v, num_bytes in block.made.items()}
            rest = self._take(block.rest) + small + self._take_small(_AFTER)
            self._give(work)
            kept.append([place for v in block.kept for place in places[v]] + rest)
            passing |= {v: places[v] for v in places.keys() - block.kept}
            for v in block.unused:
                self._give(passing.pop(v, []))
        return kept

    def _backward(self, stage: int, arrived: Mapping[int, int], kept: list[list[int]]) -> None:
        gradients = {v: [place] for v, place in arrived.items()}
        blocks = self._stages[stage].blocks
        for k in reversed(range(len(blocks))):
            self._backward_of_block((stage, k), blocks[k], gradients)
            self._give(kept[k])
        self._leaving += [place for places in gradients.values() for place in places]

    def _backward_of_block(self, key: tuple[int, int], block: BlockTensors, gradients: dict[int, list[int]]) -> None:
        """Makes the gradients of what a block has read, and lets go of those of what it made."""
        work = self._take(block.work)
        fresh = {v: self._take(num_bytes) for v, num_bytes in block.read.items()}
        weights = [place for num_bytes in block.weights for place in self._take(num_bytes)]
        self._give(work)
        for v, places in fresh.items():
            if v in gradients:
                self._give(places)  # added to what is there
            else:
                gradients[v] = places
        if key in self._weights:
            self._give(weights)
        else:
            self._weights[key] = weights
        for v in block.made:
            self._give(gradients.pop(v, []))

    def _take_small(self, pieces: Sequence[tuple[int, bool]]) -> list[int]:
        """Returns where small pieces lie that stay; others are gone."""
        places = [(self.heap.take_small(num_bytes), stays) for num_bytes, stays in pieces]
        self._give(place for place, stays in places if not stays)
        return [place for place, stays in places if stays]

    def _take_alike(self, num_bytes: float, count: float) -> list[int]:
        """Takes so many tensors of one size, the last one as small as the count says."""
        whole = int(count)
        sizes = [num_bytes] * whole + [num_bytes * (count - whole)]
        return [place for size in sizes for place in self._take(size)]

    def _take(self, num_bytes: float) -> list[int]:
        """Returns where it is put; nowhere if it is next to nothing."""
        return [self.heap.take(int(num_bytes))] if num_bytes >= _LEAST_BYTES else []

    def _give(self, places: Iterable[int]) -> None:
        for place in places:
            self.heap.give(place)
