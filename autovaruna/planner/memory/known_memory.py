"""Defines `KnownMemory`: a search asks for the same stages and heaps again, in plans that differ elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from autovaruna.graph.records import Graph
from autovaruna.planner.costs import Array, Costs
from autovaruna.planner.memory.handed_out import HandedOut
from autovaruna.planner.memory.heap import Heap
from autovaruna.planner.memory.holdings import Holdings, holdings_of_stage
from autovaruna.planner.memory.stage_tensors import StageTensors, tensors_of_stage
from autovaruna.planner.ranges import gradient_bytes
from autovaruna.planner.records import Plan
from autovaruna.schedule import Instruction


class HeapBytes(NamedTuple):
    """What a heap takes: the most that lies in it at a time, and the holes in it."""

    peak_bytes: float
    hole_bytes: float


class KnownMemory:
    """What stages hold, and the heaps of ranks that run them, in plans of one problem, by all that they follow from.

    Attributes:
        num_followed: the instructions that heaps were made of so far.
    """

    def __init__(self) -> None:
        self._known: dict[object, HeapBytes] = {}
        self._held: dict[tuple[float, tuple[int, ...]], Holdings[float]] = {}
        self._tensors: dict[tuple[float, tuple[int, ...]], StageTensors] = {}
        self._gradients: Array | None = None
        self.num_followed = 0

    def held_by(self, graph: Graph, costs: Costs, blocks: tuple[int, ...]) -> Holdings[float]:
        """Returns what a stage holds at the micro-batch size of `costs`."""
        key = costs.micro_batch_size, blocks
        if self._gradients is None:
            self._gradients = gradient_bytes(graph)
        if key not in self._held:
            self._held[key] = holdings_of_stage(graph, costs, blocks, self._gradients)
        return self._held[key]

    def tensors_of(self, graph: Graph, costs: Costs, blocks: tuple[int, ...]) -> StageTensors:
        """Returns the tensors of a stage at the micro-batch size of `costs`."""
        key = costs.micro_batch_size, blocks
        if key not in self._tensors:
            self._tensors[key] = tensors_of_stage(graph, costs, blocks)
        return self._tensors[key]

    def heap_of(
        self,
        plan: Plan,
        program: Sequence[Instruction],
        stages: Collection[int],
        own_micro_batches: range,
        inputs: HandedOut,
        make: Callable[[], Heap],
    ) -> HeapBytes:
        """Returns what the heap of a rank takes; makes it if it is not known.

        Args:
            plan: the plan; its number of micro-batches says the size of the greatest one.
            program: the instructions of the rank, in order.
            stages: its stages.
            own_micro_batches: those whose inputs are slices of the rank's own mini-batch.
            inputs: where those of other micro-batches lie.
            make: makes the heap.
        """
        key = (
            plan.num_micro_batches,
            tuple((stage, plan.stages[stage].blocks) for stage in sorted(stages)),
            tuple(program),
            frozenset(own_micro_batches).intersection(each.micro_batch for each in program),
            frozenset(inputs.lent),
            frozenset(inputs.copied.items()),
            bool(plan.host_of),
        )
        if key not in self._known:
            heap = make()
            self.num_followed += len(program)
            self._known[key] = HeapBytes(heap.peak_bytes, heap.hole_bytes)
        return self._known[key]
