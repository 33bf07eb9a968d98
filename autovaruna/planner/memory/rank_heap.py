"""Defines `RankHeap`: the heap of a rank while it runs instructions, tensor by tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autovaruna.planner.memory.handed_out import HandedOut, InputKey
from autovaruna.planner.memory.heap import Heap
from autovaruna.planner.memory.lent import MAX_BYTES, is_lent
from autovaruna.planner.memory.stage_tensors import BlockTensors, StageTensors
from autovaruna.schedule import Instruction, Kind

_AHEAD = 4
"""Receives are posted for this instruction and the next few, unless messages come by themselves."""
_LEAST_BYTES = 1 << 6
_BEFORE: tuple[tuple[int, bool], ...] = ((16, False), (16, True), (16, False), (176, True), (96, False))
_AFTER: tuple[tuple[int, bool], ...] = ((16, False), (16, True), (480, False), (96, True), (16, False))
"""Bytes of small pieces that a block makes before and after its tensors, and whether they stay until its backward.

A node of autograd, with what describes its tensors, is some 15 pieces of 16 to 500 bytes in any model, half of them of
16 to 24. Those that stay keep tensors out of the holes that they lie in; those that go leave room for the next ones.
"""

Key = tuple[int, int, bool]
"""A stage, a micro-batch, and whether it goes forward."""


@dataclass(frozen=True)
class _Kept:
    """Where lies what a block keeps until its backward: values and small pieces, and what else it has taken."""

    places: list[int]
    rest: list[list[int]]

    @property
    def all_places(self) -> list[int]:
        """All of it."""
        return self.places + [place for each in self.rest for place in each]


class RankHeap:
    """The heap of one rank while it runs instructions.

    Args:
        stages: The tensors of its stages.
        recomputing: Those that recompute.
        own_micro_batches: Those whose inputs are slices of the rank's own mini-batch.
        shares: Whether messages come in memory that ranks share (see `lent`).
        inputs: Where the inputs of other micro-batches lie, if they come like that, too.
    """

    def __init__(
        self,
        stages: Mapping[int, StageTensors],
        recomputing: Collection[int],
        own_micro_batches: Collection[int],
        shares: bool = False,
        inputs: HandedOut | None = None,
    ) -> None:
        self.heap = Heap()
        self._stages, self._recomputing = stages, recomputing
        self._own_micro_batches, self._shares = own_micro_batches, shares
        self._inputs, self._copied = inputs or HandedOut(), dict[InputKey, list[int]]()
        self._posted: dict[Key, dict[int, list[int]]] = {}
        self._leaving: list[int] = []
        self._received, self._kept = dict[tuple[int, int], list[int]](), dict[tuple[int, int], list[_Kept]]()
        self._weights: dict[tuple[int, int], list[int]] = {}
        self._shared: list[int] = []

    def run(self, program: Sequence[Instruction]) -> None:
        """Runs the instructions of a step."""
        self._copied = {key: self._take(num_bytes) for key, num_bytes in self._inputs.copied.items()}
        for place, instruction in enumerate(program):
            for ahead, following in enumerate(program[place : place + _AHEAD]):
                self._post(following, is_now=not ahead)
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

    def _post(self, instruction: Instruction, *, is_now: bool) -> None:
        is_forward = instruction.kind is Kind.FORWARD
        key = instruction.stage, instruction.micro_batch, is_forward
        if key in self._posted or instruction.kind not in (Kind.FORWARD, Kind.BACKWARD):
            return
        stage = self._stages[instruction.stage]
        awaited = stage.received if is_forward else stage.gradients_received
        if instruction.micro_batch in self._own_micro_batches:
            awaited = {v: num_bytes for v, num_bytes in awaited.items() if v >= 0}
        if self._shares and not is_now and all(num_bytes <= MAX_BYTES for num_bytes in awaited.values()):
            return
        self._posted[key] = {v: self._received_at(key, v, num_bytes) for v, num_bytes in awaited.items()}

    def _received_at(self, key: Key, v: int, num_bytes: float) -> list[int]:
        """Returns where a message lies; a copy that has waited is gone then."""
        if (key[0], key[1], v) in self._inputs.lent or (self._shares and v >= 0 and is_lent(num_bytes)):
            return []
        places = self._take(num_bytes)
        self._give(self._copied.pop((key[0], key[1], v), []))
        return places

    def _run(self, instruction: Instruction) -> None:
        stage, key = self._stages[instruction.stage], (instruction.stage, instruction.micro_batch)
        if instruction.kind is Kind.FORWARD:
            self._received[key] = [place for places in self._posted.pop((*key, True)).values() for place in places]
        if instruction.kind in (Kind.FORWARD, Kind.RECOMPUTE):
            kept = self._forward(stage)
            if instruction.kind is Kind.FORWARD and instruction.stage in self._recomputing:
                for each in kept:
                    self._give(each.all_places)
            else:
                self._kept[key] = kept
        if instruction.kind is Kind.BACKWARD:
            self._backward(instruction.stage, self._posted.pop((*key, False)), self._kept.pop(key))
            self._give(self._received.pop(key))

    def _forward(self, stage: StageTensors) -> list[_Kept]:
        """Returns where lies what each block keeps."""
        passing: dict[int, list[int]] = {}
        kept = []
        for block in stage.blocks:
            small = self._take_small(_BEFORE)
            places, rest = self._make(block)
            small += self._take_small(_AFTER)
            kept.append(_Kept([place for v in block.kept for place in places[v]] + small, rest))
            passing |= {v: places[v] for v in places.keys() - block.kept}
            for v in block.unused:
                self._give(passing.pop(v, []))
        return kept

    def _make(self, block: BlockTensors) -> tuple[dict[int, list[int]], list[list[int]]]:
        """Runs a block forward; returns where lie the values that it makes, and what else it keeps, by number."""
        if block.steps is None:
            work = self._take(block.forward_work)
            places = {v: self._take(num_bytes) for v, num_bytes in block.made.items()}
            rest = self._take(block.rest)
            self._give(work)
            return places, [rest]
        taken: list[list[int]] = []
        self._follow(block.steps.forward, taken)
        places = {v: [] for v in block.made}
        for v, number in block.steps.made.items():
            places[v], taken[number - 1] = taken[number - 1], []
        return places, taken

    def _backward(self, stage: int, arrived: Mapping[int, list[int]], kept: list[_Kept]) -> None:
        gradients = dict(arrived)
        blocks = self._stages[stage].blocks
        for k in reversed(range(len(blocks))):
            self._backward_of_block((stage, k), blocks[k], kept[k], gradients)
            self._give(kept[k].all_places)
        self._leaving += [place for places in gradients.values() for place in places]

    def _backward_of_block(
        self, key: tuple[int, int], block: BlockTensors, kept: _Kept, gradients: dict[int, list[int]]
    ) -> None:
        """Makes the gradients of what a block has read, and lets go of those of what it made."""
        fresh, weights = self._make_gradients(block, kept, gradients)
        for v, places in fresh.items():
            gradients[v] = self._added_up(gradients[v], places, block.read[v]) if v in gradients else places
        if key in self._weights:
            self._give(weights)
        else:
            self._weights[key] = weights
        for v in block.made:
            self._give(gradients.pop(v, []))

    def _make_gradients(
        self, block: BlockTensors, kept: _Kept, gradients: dict[int, list[int]]
    ) -> tuple[dict[int, list[int]], list[int]]:
        """Runs a block backward; returns where lie the gradients of what it has read, and of its parameters."""
        if block.steps is None:
            work = self._take(block.work)
            fresh = {v: self._take(num_bytes) for v, num_bytes in block.read.items()}
            weights = [place for num_bytes in block.weights for place in self._take(num_bytes)]
            self._give(work)
            return fresh, weights
        taken = kept.rest
        self._follow(block.steps.backward, taken)
        fresh = {}
        for v, number in block.steps.read.items():
            fresh[v], taken[number - 1] = taken[number - 1], []
        weights = []
        for number in block.steps.weights:
            weights += taken[number - 1]
            taken[number - 1] = []
        for v in block.read.keys() - fresh.keys():
            fresh[v] = self._passed_on(block, block.read[v], gradients)
        return fresh, weights

    def _passed_on(self, block: BlockTensors, num_bytes: float, gradients: dict[int, list[int]]) -> list[int]:
        """Returns where a gradient lies that is none of its own: it is that of what the block has made, shared."""
        for v, made in block.made.items():
            if made == num_bytes and v in gradients:
                self._shared += gradients[v]
                return list(gradients[v])
        return self._take(num_bytes)

    def _added_up(self, first: list[int], second: list[int], num_bytes: float) -> list[int]:
        """Returns where the sum of two gradients lies: where the first one does, unless another shares that."""
        is_shared = any(place in self._shared for place in first)
        total = self._take(num_bytes) if is_shared else first
        self._give(second)
        if is_shared:
            self._give(first)
        return total

    def _follow(self, steps: Iterable[int], taken: list[list[int]]) -> None:
        """Takes and gives back as recorded; `taken` are the places by number."""
        for step in steps:
            if step > 0:
                taken.append(self._take(step))
            else:
                self._give(taken[-step - 1])
                taken[-step - 1] = []

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
            if place in self._shared:
                self._shared.remove(place)
            else:
                self.heap.give(place)
