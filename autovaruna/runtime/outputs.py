"""Takes outputs of micro-batches to the ranks whose samples they are of, and their gradients back to the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from autovaruna.graph.lengths import free_value
from autovaruna.graph.operators import Merge
from autovaruna.graph.traced import OutputKind, OutputSpec, joined, opened
from autovaruna.runtime.batch import GlobalBatch, MicroBatch
from autovaruna.runtime.executor import RankContext
from autovaruna.runtime.mail import MessageKind
from autovaruna.runtime.program import ModelCall, Program


class OutputCollector:
    """Collects the outputs of one call. Every rank takes part.

    `made` are those that this rank's stages made, by (output, micro-batch).
    """

    def __init__(self, program: Program, rank: RankContext, made: Mapping[tuple[int, int], Tensor]) -> None:
        self.program, self.world, self.mail, self.device = program, rank.world, rank.mail, rank.device
        self.made = made
        self._known_makers: dict[int, list[int]] = {}

    def send(self, places: Mapping[int, OutputSpec]) -> None:
        """Starts to send what this rank's stages made to the ranks that get it; never blocks."""
        for place, spec in places.items():
            if spec.kind is not OutputKind.SAMPLES:
                self._send_numbers(place, spec)
                continue
            for part in self.program.batch.micro_batches.values():
                for receiver in self.program.batch.receivers(part) if (place, part.index) in self.made else ():
                    kind = self.program.messages.output(place, part, receiver)
                    self.mail.send([self.made[place, part.index]], kind)

    def collect(self, places: Mapping[int, OutputSpec]) -> dict[int, Tensor]:
        """Returns the outputs of `places`, once every rank has sent its part; a rank without samples gets no rows."""
        return {
            place: self._samples(place, spec) if spec.kind is OutputKind.SAMPLES else self._number(place, spec)
            for place, spec in places.items()
        }

    def _samples(self, place: int, spec: OutputSpec) -> Tensor:
        program, rank = self.program, self.world.rank
        kinds = [program.messages.output(place, part, rank) for part in program.batch.owned_by(rank)]
        parts, traced = [part for kind in kinds for part in self.mail.receive(kind) if part is not None], program.traced
        if parts:
            return joined(parts, spec.dimension, traced.outer(spec, program.lengths))
        value: Tensor = free_value(traced.nodes[spec.node])
        shape = list(traced.sizes.in_call(value, 1, program.lengths))
        shape[spec.dimension] = 0
        return torch.empty(shape, dtype=value.dtype, device=self.device)

    def _send_numbers(self, place: int, spec: OutputSpec) -> None:
        """Sends what this rank's micro-batches gave for an output without samples to every rank, in one message."""
        parts = self._parts(spec)
        makers = self._makers(place, parts)
        rank = self.world.rank
        if rank not in makers:
            return
        pairs = zip(parts, makers, strict=True)
        made = torch.stack([self.made[place, part.index] for part, maker in pairs if maker == rank])
        made = made if _num_slots(makers, rank) else self._combine(made, parts, spec)
        for receiver in range(self.world.num_ranks):
            self.mail.send([made], self._numbers(place, makers, rank, receiver))

    def _number(self, place: int, spec: OutputSpec) -> Tensor:
        """Puts an output without samples together: one slot a micro-batch, unless one rank has computed them all."""
        parts = self._parts(spec)
        makers = self._makers(place, parts)
        made: dict[int, Tensor] = {}
        for maker in dict.fromkeys(makers):
            (received,) = self.mail.receive(self._numbers(place, makers, maker, self.world.rank))
            assert received is not None, "numbers are always there"
            made[maker] = received
        if len(made) == 1:
            return made[makers[0]]
        turns = {maker: iter(slots) for maker, slots in made.items()}
        return self._combine(torch.stack([next(turns[maker]) for maker in makers]), parts, spec)

    def _parts(self, spec: OutputSpec) -> list[MicroBatch]:
        """Returns the micro-batches whose numbers count: the first alone if all have the same."""
        parts = list(self.program.batch.micro_batches.values())
        return parts[:1] if spec.kind is OutputKind.SAME else parts

    def _combine(self, slots: Tensor, parts: list[MicroBatch], spec: OutputSpec) -> Tensor:
        match spec.kind:
            case OutputKind.SAME:
                return slots[0]
            case OutputKind.TOTAL if spec.merge is not Merge.SUM:
                return slots.amax(0) if spec.merge is Merge.LARGEST else slots.amin(0)
            case OutputKind.TOTAL:
                return slots.sum(0, dtype=slots.dtype) if slots.dtype != torch.bool else slots.any(0)
            case _:
                if len(parts) == 1:
                    return slots[0]
                wide = slots.to(torch.complex128 if slots.is_complex() else torch.float64)
                weights = _weights(self.program.batch, slots.device)
                return (wide * weights.view(-1, *[1] * (slots.dim() - 1))).sum(0).to(slots.dtype)

    def _numbers(self, place: int, makers: Sequence[int], maker: int, receiver: int) -> MessageKind:
        return self.program.messages.numbers(place, maker, receiver, _num_slots(makers, maker))

    def _makers(self, place: int, parts: list[MicroBatch]) -> list[int]:
        if place not in self._known_makers:
            self._known_makers[place] = [self.program.messages.maker_of(place, part) for part in parts]
        return self._known_makers[place]


def _num_slots(makers: Sequence[int], maker: int) -> int:
    """Returns of how many micro-batches one of several makers sends numbers; 0: the only one sends the result."""
    return 0 if makers.count(maker) == len(makers) else makers.count(maker)


@lru_cache(maxsize=64)
def _weights(batch: GlobalBatch, device: torch.device) -> Tensor:
    return torch.tensor([part.weight for part in batch.micro_batches.values()], dtype=torch.float64, device=device)


class GradientExchange:
    """Exchanges the gradients of one call that do not belong to parameters: of its outputs and of its inputs.

    `made` are those of inputs that this rank's stages make, by (input, micro-batch). `root_names` names the outputs
    that the backward starts from.
    """

    def __init__(self, call: ModelCall, rank: RankContext, made: Mapping[tuple[str, int], Tensor | None]) -> None:
        self.program, self.world, self.mail, self.inputs = call.program, rank.world, rank.mail, call.inputs
        self.made, self._call, self.root_names = made, call.name, ""
        self._gradients: dict[int, Tensor | None] = {}

    def spread_output_gradients(self, gradients: Sequence[Tensor | None], zeros: Sequence[Tensor]) -> None:
        """Sends the gradients of this rank's outputs to the stages that made them. Collective.

        The caller has not used those that are None. An output that some rank's loss uses has a gradient on every rank.
        """
        own = [place for place, gradient in enumerate(gradients) if gradient is not None]
        what = f"agreeing on the outputs of {self._call} that backward starts from"
        used = {int(place) for places in self.world.gather_numbers(own, what) for place in places}
        self.root_names = f"/{sorted(used)}"
        self._gradients = {
            place: zero if gradient is None and place in used else gradient
            for place, (gradient, zero) in enumerate(zip(gradients, zeros, strict=True))
        }
        program, specs, rank, batch = self.program, self.program.outputs, self.world.rank, self.program.batch
        for place, gradient in self._gradients.items():
            if gradient is not None and specs[place].kind is not OutputKind.SAMPLES:
                weighted = gradient * program.weight_of_origin(rank)  # all ranks have the output alike
                self.world.all_reduce(weighted, tuple(range(self.world.num_ranks)))
                self._gradients[place] = weighted
        for part in [each for each in batch.owned_by(rank) if each.origin == rank]:
            for place, spec in specs.items():
                is_there = batch.has(program.messages.maker_of(place, part), part)
                if spec.kind is OutputKind.SAMPLES and self._gradients[place] is not None and not is_there:
                    kind = program.messages.output_gradient(place, part, self.root_names)
                    self.mail.send([self._own_part(place, spec, part)], kind)

    def output_gradient(self, place: int, part: MicroBatch) -> Tensor | None:
        """Returns the gradient of an output for one micro-batch, at the stage that made it."""
        spec, gradient, batch = self.program.outputs[place], self._gradients[place], self.program.batch
        if gradient is None:
            return None
        if spec.kind is OutputKind.SAMPLES:
            if batch.has(self.world.rank, part):
                return self._own_part(place, spec, part)
            return self.mail.receive(self.program.messages.output_gradient(place, part, self.root_names))[0]
        if spec.kind is OutputKind.SAME:
            return gradient if part.index == min(batch.micro_batches) else None
        return gradient * part.weight

    def input_gradients(self) -> dict[str, Tensor | None]:
        """Returns the gradients of this rank's inputs. Every rank takes part."""
        batch, batch_inputs = self.program.batch, self.program.traced.batch_inputs
        for (name, m), gradient in self.made.items():
            if name in batch_inputs:
                part = batch.micro_batches[m]
                for receiver in batch.receivers(part):
                    kind = self.program.messages.input_gradient(name, part, receiver, self.root_names)
                    self.mail.send([gradient], kind)
        return {
            name: self._gather_parts(name) if name in batch_inputs else self._sum_everywhere(name)
            for name in sorted(self.program.split.input_gradients)
        }

    def _own_part(self, place: int, spec: OutputSpec, part: MicroBatch) -> Tensor | None:
        """Returns the rows of an output's gradient that belong to a micro-batch, weighted as its rank's loss is."""
        gradient = self._gradients[place]
        if gradient is None:
            return None
        outer, inner = spec.dimension, spec.dimension + 1
        whole = opened(gradient, outer, self.program.traced.outer(spec, self.program.lengths))
        num_rows = whole.shape[inner] // self.program.batch.num_samples_of(self.world.rank)
        rows = whole.narrow(inner, part.start * num_rows, part.size * num_rows).flatten(outer, inner)
        weight = self.program.weight_of(self.world.rank)
        return rows.contiguous() if weight == 1.0 else (rows * weight).contiguous()

    def _gather_parts(self, name: str) -> Tensor | None:
        rank, messages = self.world.rank, self.program.messages
        mine = self.program.batch.owned_by(rank)
        parts = [self.mail.receive(messages.input_gradient(name, part, rank, self.root_names))[0] for part in mine]
        if all(part is None for part in parts):
            return None
        filled = [
            torch.zeros_like(self.inputs[name][: part.size]) if gradient is None else gradient
            for part, gradient in zip(mine, parts, strict=True)
        ]
        return torch.cat(filled)

    def _sum_everywhere(self, name: str) -> Tensor:
        """Sums the gradient of a tensor that is no batch over micro-batches and ranks."""
        total = torch.zeros_like(self.inputs[name])
        for (other, _), gradient in self.made.items():
            if other == name and gradient is not None:
                total.add_(gradient)
        self.world.all_reduce(total, tuple(range(self.world.num_ranks)))
        return total
