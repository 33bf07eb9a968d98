"""Defines `RankHeap`: the heap of a rank while it runs instructions, tensor by tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autovaruna.planner.memory.chances import LISTED, Chance
from autovaruna.planner.memory.handed_out import HandedOut, InputKey
from autovaruna.planner.memory.heap import Heap
from autovaruna.planner.memory.kept import Kept
from autovaruna.planner.memory.lent import LENT_BYTES, MAX_BYTES, is_lent
from autovaruna.planner.memory.places import Places
from autovaruna.planner.memory.stage_tensors import BlockTensors, StageTensors
from autovaruna.schedule import Instruction, Kind

_AHEAD = 4
"""Receives are posted for this instruction and the next few, unless messages come by themselves."""
Key = tuple[int, int, bool]
"""A stage, a micro-batch, and whether it goes forward."""


class RankHeap:
    """The heap of one rank while it runs instructions.

    Args:
        stages: The tensors of its stages.
        recomputing: Those that recompute.
        own_micro_batches: Those whose inputs are slices of the rank's own mini-batch.
        shares: Whether messages come in memory that ranks share (see `lent`).
        inputs: Where the inputs of other micro-batches lie, if they come like that, too.
        chance: What small pieces each block makes, and what is free at the beginning.
        sized: The same as `stages` for micro-batches of other sizes.
    """

    def __init__(
        self,
        stages: Mapping[int, StageTensors],
        recomputing: Collection[int],
        own_micro_batches: Collection[int],
        shares: bool = False,
        inputs: HandedOut | None = None,
        chance: Chance | None = None,
        sized: Mapping[int, Sequence[StageTensors]] | None = None,
    ) -> None:
        self._chance = chance or Chance()
        self.heap = Heap(self._chance.free_bytes)
        self._places = Places(self.heap)
        self._stages, self._sized, self._recomputing = stages, sized or {}, recomputing
        self._own_micro_batches, self._shares = own_micro_batches, shares
        self._inputs, self._copied = inputs or HandedOut(), dict[InputKey, list[int]]()
        self._posted: dict[Key, dict[int, list[int]]] = {}
        self._leaving: list[int] = []
        self._received, self._kept = dict[tuple[int, int], list[int]](), dict[tuple[int, int], list[Kept]]()
        self._weights: dict[tuple[int, int], list[int]] = {}
        self._apart, self._lent = set[int](), dict[Key, float]()

    def run(self, program: Sequence[Instruction]) -> None:
        """Runs the instructions of a step."""
        self._deferred = {(each.stage, each.micro_batch): list[int]() for each in program if each.kind is Kind.WEIGHT}
        self._copied = {key: self._places.take(num_bytes) for key, num_bytes in self._inputs.copied.items()}
        for place, instruction in enumerate(program):
            self._post(instruction, is_now=True)
            for following in program[place + (_AHEAD - 1 if place else 1) : place + _AHEAD]:  # before were the others
                self._post(following, is_now=False)
            sent, self._leaving = self._leaving, []
            self._run(instruction)
            self._places.give(sent)
        self._places.give(self._leaving)
        self._leaving = []

    def update(self, state_factor: float, work_of_largest: float) -> None:
        """Runs the optimizer's step, which makes its state if there is none yet, and lets go of the gradients."""
        for stage, k in self._weights:
            for num_bytes in self._stages[stage].blocks[k].stepped:
                self._places.take_alike(num_bytes, state_factor)
                self._places.give(self._places.take_alike(num_bytes, work_of_largest))
        for gradients in self._weights.values():
            self._places.give(gradients)
        self._weights.clear()

    def _tensors(self, instruction: Instruction) -> StageTensors:
        sized = self._sized.get(instruction.micro_batch)
        return sized[instruction.stage] if sized else self._stages[instruction.stage]

    def _post(self, instruction: Instruction, *, is_now: bool) -> None:
        is_forward = instruction.kind is Kind.FORWARD
        key = instruction.stage, instruction.micro_batch, is_forward
        if key in self._posted or instruction.kind not in (Kind.FORWARD, Kind.BACKWARD):
            return
        stage = self._tensors(instruction)
        awaited = stage.received if is_forward else stage.gradients_received
        if instruction.micro_batch in self._own_micro_batches:
            awaited = {v: num_bytes for v, num_bytes in awaited.items() if v >= 0}
        if self._shares and not is_now and all(num_bytes <= MAX_BYTES for num_bytes in awaited.values()):
            return
        spans = {} if is_forward else stage.gradient_spans
        self._posted[key] = {v: self._received_at(key, v, num_bytes, spans.get(v)) for v, num_bytes in awaited.items()}

    def _received_at(self, key: Key, v: int, num_bytes: float, span: float | None = None) -> list[int]:
        """Returns where a message lies; a copy that has waited is gone then. One with holes is copied out of it."""
        if span is not None:
            return self._places.take(span)
        if (key[0], key[1], v) in self._inputs.lent or (v >= 0 and self._is_lent(key, num_bytes)):
            return []
        places = self._places.take(num_bytes)
        self._places.give(self._copied.pop((key[0], key[1], v), []))
        return places

    def _is_lent(self, key: Key, num_bytes: float) -> bool:
        """Returns whether a message lies in shared memory until its backward: whether it finds room there."""
        there = sum(each for (stage, _, way), each in self._lent.items() if (stage, way) == (key[0], key[2]))
        if not self._shares or not is_lent(num_bytes) or there + num_bytes > LENT_BYTES:
            return False
        self._lent[key] = self._lent.get(key, 0.0) + num_bytes
        return True

    def _run(self, instruction: Instruction) -> None:
        stage, key = self._tensors(instruction), (instruction.stage, instruction.micro_batch)
        if instruction.kind is Kind.FORWARD:
            self._received[key] = [place for places in self._posted.pop((*key, True)).values() for place in places]
        if instruction.kind in (Kind.FORWARD, Kind.RECOMPUTE):
            kept = self._forward(stage)
            if instruction.kind is Kind.FORWARD and instruction.stage in self._recomputing:
                for each in kept:
                    self._places.give(each.all_places)
            else:
                self._kept[key] = kept
        if instruction.kind is Kind.BACKWARD:
            deferred = self._deferred.get(key)
            self._backward(instruction.stage, stage, self._posted.pop((*key, False)), self._kept.pop(key), deferred)
            self._places.give(self._received.pop(key))
            for way in (True, False):
                self._lent.pop((*key, way), None)
        if instruction.kind is Kind.WEIGHT:
            self._places.give(self._deferred.pop(key))

    def _forward(self, stage: StageTensors) -> list[Kept]:
        """Returns where lies what each block keeps, and then what it sends, which is held until its backward ends."""
        passing: dict[int, list[int]] = {}
        kept, sent, sends = [], list[int](), stage.gradients_received.keys()
        for block in stage.blocks:
            small = self._places.take_small(self._chance.before)
            places, rest = self._make(block)
            small += self._places.take_small(self._chance.after)
            kept.append(Kept([place for v in block.kept for place in places[v]] + small, rest))
            sent += self._places.share([place for v in places.keys() & sends for place in places[v]])
            passing |= {v: places[v] for v in places.keys() - block.kept}
            for v in block.unused:
                self._places.give(passing.pop(v, []))
        return [*kept, Kept(sent, [])]

    def _make(self, block: BlockTensors) -> tuple[dict[int, list[int]], list[list[int]]]:
        """Runs a block forward; returns where lie the values that it makes, and what else it keeps, by number."""
        if block.steps is None:
            work = self._places.take(block.forward_work)
            places = {v: self._places.take(num_bytes) for v, num_bytes in block.made.items()}
            rest = self._places.take(block.rest)
            self._places.give(work)
            return places, [rest]
        taken: list[list[int]] = []
        self._places.follow(block.steps.forward, taken)
        places = {v: [] for v in block.made}
        for v, number in block.steps.made.items():
            places[v], taken[number - 1] = taken[number - 1], []
        return places, taken

    def _backward(
        self,
        stage: int,
        tensors: StageTensors,
        arrived: Mapping[int, list[int]],
        kept: list[Kept],
        deferred: list[int] | None,
    ) -> None:
        """Runs a stage backward; adds to `deferred`, if it is split, what stays until weight gradients are computed.

        What has arrived, and what it is the gradient of, is held until the end: nothing is added into it. Of a split
        one, `deferred` has that, too.
        """
        gradients, blocks = dict(arrived), tensors.blocks
        listed = self._places.take_small(LISTED * len(blocks))
        held = kept.pop().places + self._places.share([place for places in arrived.values() for place in places])
        self._apart = set(arrived)
        if deferred is not None:
            self._places.give(held)
            held = []
        for k in reversed(range(len(blocks))):
            self._backward_of_block((stage, k), blocks[k], kept[k], gradients)
            self._places.give(kept[k].all_places)
            if deferred is not None:
                half = blocks[k].deferred / 2  # what went in, and the gradient that came back
                deferred += self._places.take_alike(half, 2)
        self._places.give(held + listed)
        self._leaving += [place for places in gradients.values() for place in places]

    def _backward_of_block(
        self, key: tuple[int, int], block: BlockTensors, kept: Kept, gradients: dict[int, list[int]]
    ) -> None:
        """Makes the gradients of what a block has read, and lets go of those of what it made."""
        fresh, weights = self._make_gradients(block, kept, gradients)
        spans = block.steps.spans if block.steps else {}
        for v, places in fresh.items():
            if v in gradients:
                gradients[v] = self._places.added_up(gradients[v], places, block.read[v], v in self._apart)
                self._apart.discard(v)
            else:
                gradients[v] = places
                self._apart |= spans.keys() & {v}
        if key in self._weights:
            self._places.give(weights)
        else:
            self._weights[key] = weights
        for v in block.made:
            self._places.give(gradients.pop(v, []))
            self._apart.discard(v)

    def _make_gradients(
        self, block: BlockTensors, kept: Kept, gradients: dict[int, list[int]]
    ) -> tuple[dict[int, list[int]], list[int]]:
        """Runs a block backward; returns where lie the gradients of what it has read, and of its parameters."""
        if block.steps is None:
            work = self._places.take(block.work)
            fresh = {v: self._places.take(num_bytes) for v, num_bytes in block.read.items()}
            weights = [place for num_bytes in block.weights for place in self._places.take(num_bytes)]
            self._places.give(work)
            return fresh, weights
        taken = kept.rest
        self._places.follow(block.steps.backward, taken)
        fresh = {}
        numbers = list(block.steps.read.values())
        for place, (v, number) in enumerate(block.steps.read.items()):
            lies = taken[number - 1]
            fresh[v] = self._places.share(lies) if number in numbers[:place] else lies
        weights = []
        for number in block.steps.weights:
            weights += taken[number - 1]
        for number in {*numbers, *block.steps.weights}:
            taken[number - 1] = []
        for v in block.read.keys() - fresh.keys():
            fresh[v] = self._passed_on(block, v, gradients)
        return fresh, weights

    def _passed_on(self, block: BlockTensors, v: int, gradients: dict[int, list[int]]) -> list[int]:
        """Returns where a gradient lies that is none of its own: it is that of what the block has made, shared."""
        known = block.steps.passed.get(v) if block.steps else None
        for w, made in block.made.items():
            if w in gradients and (made == block.read[v] if known is None else w == known):
                return self._places.share(gradients[w])
        return self._places.take(block.read[v])
