"""Takes outputs of micro-batches to the ranks whose samples they are of, and their gradients back to the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from autovaruna.graph.lengths import free_value
from autovaruna.graph.traced import OutputKind, OutputSpec, joined, opened
from autovaruna.runtime.batch import GlobalBatch, Job, MicroBatch
from autovaruna.runtime.mail import Kind, Mail, Route
from autovaruna.runtime.world import World


class OutputCollector:
    """Collects the outputs of one job. Every rank takes part.

    Args:
        made: Outputs that this rank's stages made, by (output, micro-batch).
        device: Where outputs are wanted.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        mail: Mail,
        made: Mapping[tuple[int, int], Tensor],
        device: torch.device,
    ) -> None:
        self._job = job
        self._world = world
        self._mail = mail
        self._made = made
        self._device = device
        self._own: dict[int, Tensor] = {}
        self._known_makers: dict[int, list[int]] = {}

    def collect(self, places: Mapping[int, OutputSpec]) -> dict[int, Tensor]:
        """Returns the outputs of `places` for this rank's mini-batch."""
        self.send(places)
        return self.take(places)

    def expect(self, places: Mapping[int, OutputSpec]) -> None:
        """Posts the receives of numbers, which are few; never blocks."""
        for place, spec in places.items():
            if spec.kind is not OutputKind.SAMPLES:
                makers = self._makers(place, self._parts(spec))
                for maker in dict.fromkeys(makers):
                    if maker != self._world.rank:
                        self._mail.expect(self._number_kind(place, maker, self._world.rank, _num_slots(makers, maker)))

    def send(self, places: Mapping[int, OutputSpec]) -> None:
        """Starts to send what this rank's stages made to the ranks that get it; never blocks."""
        for place, spec in places.items():
            if spec.kind is OutputKind.SAMPLES:
                self._send_samples(place)
            else:
                self._send_numbers(place, spec)

    def take(self, places: Mapping[int, OutputSpec]) -> dict[int, Tensor]:
        """Returns the outputs of `places`, once every rank has sent its part.

        A rank that passed no samples gets an empty tensor of samples.
        """
        return {
            place: self._samples(place, spec) if spec.kind is OutputKind.SAMPLES else self._number(place, spec)
            for place, spec in places.items()
        }

    def _send_samples(self, place: int) -> None:
        for part in self._job.batch.micro_batches.values():
            made = self._made.get((place, part.index))
            if made is not None:
                for receiver in self._job.batch.receivers(part):
                    self._mail.send([made], self._kind(place, part, receiver))

    def _samples(self, place: int, spec: OutputSpec) -> Tensor:
        taken = [
            self._mail.take(self._kind(place, part, self._world.rank))[0]
            for part in self._job.batch.owned_by(self._world.rank)
        ]
        parts = [part for part in taken if part is not None]
        if not parts:
            return self._empty(spec)
        return joined(parts, spec.dimension, self._job.split.traced.outer(spec, self._job.lengths))

    def _empty(self, spec: OutputSpec) -> Tensor:
        traced = self._job.split.traced
        value: Tensor = free_value(traced.nodes[spec.node])
        shape = list(traced.sizes.in_call(value, 1, self._job.lengths))
        shape[spec.dimension] = 0
        return torch.empty(shape, dtype=value.dtype, device=self._device)

    def _send_numbers(self, place: int, spec: OutputSpec) -> None:
        """Sends what this rank's micro-batches gave for an output without samples to all others, in one message."""
        parts = self._parts(spec)
        makers = self._makers(place, parts)
        rank = self._world.rank
        if rank not in makers:
            return
        pairs = zip(parts, makers, strict=True)
        made = torch.stack([self._made[place, part.index] for part, maker in pairs if maker == rank])
        num_slots = _num_slots(makers, rank)
        self._own[place] = made = made if num_slots else self._combine(made, parts, spec)
        for receiver in range(self._world.num_ranks):
            if receiver != rank:
                self._mail.send([made], self._number_kind(place, rank, receiver, num_slots))

    def _number(self, place: int, spec: OutputSpec) -> Tensor:
        """Puts an output without samples together: one slot a micro-batch, unless one rank has computed them all."""
        parts = self._parts(spec)
        makers = self._makers(place, parts)
        made = {maker: self._made_by(maker, place, makers) for maker in dict.fromkeys(makers)}
        if len(made) == 1:
            return made[makers[0]]
        turns = {maker: iter(slots) for maker, slots in made.items()}
        return self._combine(torch.stack([next(turns[maker]) for maker in makers]), parts, spec)

    def _made_by(self, maker: int, place: int, makers: Sequence[int]) -> Tensor:
        """Returns what a rank has sent of an output."""
        if maker == self._world.rank:
            return self._own.pop(place)
        kind = self._number_kind(place, maker, self._world.rank, _num_slots(makers, maker))
        taken = self._mail.take(kind)[0]
        assert taken is not None, "numbers are always there"
        return taken

    def _parts(self, spec: OutputSpec) -> list[MicroBatch]:
        """Returns the micro-batches whose numbers count: the first alone if all have the same."""
        parts = list(self._job.batch.micro_batches.values())
        return parts[:1] if spec.kind is OutputKind.SAME else parts

    def _combine(self, slots: Tensor, parts: list[MicroBatch], spec: OutputSpec) -> Tensor:
        match spec.kind:
            case OutputKind.SAME:
                return slots[0]
            case OutputKind.TOTAL:
                return slots.sum(0, dtype=slots.dtype) if slots.dtype != torch.bool else slots.any(0)
            case _:
                if len(parts) == 1:
                    return slots[0]
                wide = slots.to(torch.complex128 if slots.is_complex() else torch.float64)
                shares = _shares(self._job.batch, slots.device)
                return (wide * shares.view(-1, *[1] * (slots.dim() - 1))).sum(0).to(slots.dtype)

    def _kind(self, place: int, part: MicroBatch, receiver: int) -> Kind:
        return Kind(
            self._job.graph_key, Route(self._job.maker_of(place, part.index), receiver, 4 * place + 3), part.size
        )

    def _number_kind(self, place: int, maker: int, receiver: int, size: int) -> Kind:
        return Kind(self._job.graph_key, Route(maker, receiver, 4 * place + 3), size)

    def _makers(self, place: int, parts: list[MicroBatch]) -> list[int]:
        """Returns the rank that makes an output of each of some micro-batches."""
        if place not in self._known_makers:
            self._known_makers[place] = [self._job.maker_of(place, part.index) for part in parts]
        return self._known_makers[place]


def _num_slots(makers: Sequence[int], maker: int) -> int:
    """Returns of how many micro-batches one of several makers sends numbers; 0: the only one sends the result."""
    return 0 if makers.count(maker) == len(makers) else makers.count(maker)


@lru_cache(maxsize=64)
def _shares(batch: GlobalBatch, device: torch.device) -> Tensor:
    """Returns the share of each micro-batch in the loss."""
    return torch.tensor([part.share for part in batch.micro_batches.values()], dtype=torch.float64, device=device)


_INPUT_GRADIENT_TAG = 1 << 18


class GradientExchange:
    """Exchanges the gradients of one job that do not belong to parameters.

    Args:
        made: The gradients of inputs that this rank's stages make, by (input, micro-batch).
    """

    def __init__(
        self,
        job: Job,
        world: World,
        mail: Mail,
        made: Mapping[tuple[str, int], Tensor | None],
        inputs: Mapping[str, Tensor],
    ) -> None:
        self._job = job
        self._world = world
        self._mail = mail
        self._made = made
        self._inputs = inputs
        self._gradients: dict[int, Tensor | None] = {}
        self.origin = ""
        self._batch_inputs = job.split.traced.batch_inputs

    @property
    def own_weight(self) -> float:
        """The weight of this rank's own loss in that of the global batch."""
        return self._job.rank_weight(self._world.rank)

    def spread_output_gradients(self, gradients: Sequence[Tensor | None], zeros: Sequence[Tensor]) -> None:
        """Sends the gradients of this rank's outputs to the stages that made them. Collective.

        An output that some rank's loss uses has a gradient on every rank, of zeros where it is not used. `origin` says
        which those are: what follows has other messages for others.

        Args:
            gradients: One for each output of the model; None where the caller did not use it.
            zeros: Gradients of zeros.
        """
        own = [place for place, gradient in enumerate(gradients) if gradient is not None]
        what = f"agreeing on the outputs of {self._job.name} that backward starts from"
        used = set().union(*self._world.gather_objects(own, what))
        self.origin = f"/{sorted(used)}"
        self._gradients = {
            place: zero if gradient is None and place in used else gradient
            for place, (gradient, zero) in enumerate(zip(gradients, zeros, strict=True))
        }
        for place, gradient in self._gradients.items():
            if gradient is not None and self._job.split.traced.outputs[place].kind is not OutputKind.SAMPLES:
                weighted = gradient * self._job.weight_of_origin(self._world.rank)  # all ranks have the output alike
                self._gradients[place] = self._sum_of_ranks(weighted)
        for part in self._job.batch.owned_by(self._world.rank):
            for place, spec in enumerate(self._job.split.traced.outputs) if part.origin == self._world.rank else ():
                is_there = self._job.batch.has(self._job.maker_of(place, part.index), part)
                if spec.kind is OutputKind.SAMPLES and self._gradients[place] is not None and not is_there:
                    self._mail.send([self._own_part(place, spec, part)], self._output_kind(place, part))

    def output_gradient(self, place: int, part: MicroBatch) -> Tensor | None:
        """Returns the gradient of an output for one micro-batch, at the stage that made it."""
        spec, gradient = self._job.split.traced.outputs[place], self._gradients[place]
        if gradient is None:
            return None
        if spec.kind is OutputKind.SAMPLES:
            if self._job.batch.has(self._world.rank, part):
                return self._own_part(place, spec, part)
            return self._mail.take(self._output_kind(place, part))[0]
        if spec.kind is OutputKind.SAME:
            return gradient if part.index == min(self._job.batch.micro_batches) else None
        return gradient * part.share

    def _sum_of_ranks(self, own: Tensor) -> Tensor:
        """Adds up a tensor over all ranks, in place. Collective."""
        self._world.all_reduce(own, tuple(range(self._world.num_ranks)))
        return own

    def input_gradients(self) -> dict[str, Tensor | None]:
        """Returns the gradients of this rank's inputs. Every rank takes part."""
        names = sorted(self._job.split.input_gradients)
        for place, name in enumerate(names):
            if name in self._batch_inputs:
                self._send_input_gradient(place, name)
        return {
            name: self._gather_parts(place, name) if name in self._batch_inputs else self._sum_everywhere(name)
            for place, name in enumerate(names)
        }

    def _own_part(self, place: int, spec: OutputSpec, part: MicroBatch) -> Tensor | None:
        """Returns the rows of an output's gradient that belong to a micro-batch, weighted as its rank's loss is."""
        gradient = self._gradients[place]
        if gradient is None:
            return None
        outer = self._job.split.traced.outer(spec, self._job.lengths)
        whole, dimension = gradient, spec.dimension
        if outer != 1:
            whole, dimension = opened(gradient, dimension, outer), dimension + 1
        num_rows = whole.shape[dimension] // self._job.batch.num_samples_of(self._world.rank)
        rows = whole.narrow(dimension, part.start * num_rows, part.size * num_rows)
        if outer != 1:
            rows = rows.flatten(spec.dimension, dimension)
        weight = self.own_weight
        return rows.contiguous() if weight == 1.0 else (rows * weight).contiguous()

    def _send_input_gradient(self, place: int, name: str) -> None:
        for part in self._job.batch.micro_batches.values():
            if (name, part.index) in self._made:
                gradient = self._made[name, part.index]
                for receiver in self._job.batch.receivers(part):
                    self._mail.send([gradient], self._input_kind(place, name, part, receiver))

    def _gather_parts(self, place: int, name: str) -> Tensor | None:
        mine = self._job.batch.owned_by(self._world.rank)
        parts = [self._mail.take(self._input_kind(place, name, part, self._world.rank))[0] for part in mine]
        if all(part is None for part in parts):
            return None
        filled = [
            torch.zeros_like(self._inputs[name][: part.size]) if gradient is None else gradient
            for part, gradient in zip(mine, parts, strict=True)
        ]
        return torch.cat(filled)

    def _sum_everywhere(self, name: str) -> Tensor:
        """Sums the gradient of a tensor that is no batch over micro-batches and ranks."""
        total = torch.zeros_like(self._inputs[name])
        for (other, _), gradient in self._made.items():
            if other == name and gradient is not None:
                total.add_(gradient)
        return self._sum_of_ranks(total)

    def _output_kind(self, place: int, part: MicroBatch) -> Kind:
        route = Route(part.origin, self._job.maker_of(place, part.index), 4 * place + 3)
        return Kind(f"{self._job.graph_key}/back{self.origin}", route, part.size)

    def _input_kind(self, place: int, name: str, part: MicroBatch, receiver: int) -> Kind:
        holder = self._job.rank_of(self._job.split.input_gradients[name], part.index)
        return Kind(self._job.graph_key + self.origin, Route(holder, receiver, _INPUT_GRADIENT_TAG + place), part.size)
