"""Puts the outputs of the micro-batches together to the outputs of a call, on the ranks whose samples they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from autovaruna.graph.outputs import OutputKind, OutputSpec
from autovaruna.runtime.batch import GlobalBatch, MicroBatch
from autovaruna.runtime.job import Job
from autovaruna.runtime.mail import Kind, Mail, Route
from autovaruna.runtime.worlds.world import World


class OutputCollector:
    """Collects the outputs of one job. Every rank takes part.

    Args:
        job: The call.
        world: The ranks.
        mail: Carries tensors.
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
        self._stage = job.split.makers

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
        return torch.cat(parts, dim=spec.dimension) if parts else self._empty(spec)

    def _empty(self, spec: OutputSpec) -> Tensor:
        value: Tensor = self._job.split.traced.nodes[spec.node].meta["val"]
        shape = list(self._job.split.traced.sizes.shape(value, 1))
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
        return Kind(self._job.graph_key, Route(self._maker(place, part), receiver, 4 * place + 3), part.size)

    def _number_kind(self, place: int, maker: int, receiver: int, num_slots: int) -> Kind:
        return Kind(self._job.graph_key, Route(maker, receiver, 4 * place + 3), num_slots)

    def _makers(self, place: int, parts: list[MicroBatch]) -> list[int]:
        """Returns the rank that makes an output of each of some micro-batches."""
        if place not in self._known_makers:
            self._known_makers[place] = [self._maker(place, part) for part in parts]
        return self._known_makers[place]

    def _maker(self, place: int, part: MicroBatch) -> int:
        return self._job.rank_of(self._stage[place], part.index)


def _num_slots(makers: Sequence[int], maker: int) -> int:
    """Returns of how many micro-batches one of several makers sends numbers; 0: the only one sends the result."""
    return 0 if makers.count(maker) == len(makers) else makers.count(maker)


@lru_cache(maxsize=64)
def _shares(batch: GlobalBatch, device: torch.device) -> Tensor:
    """Returns the share of each micro-batch in the loss."""
    return torch.tensor([part.share for part in batch.micro_batches.values()], dtype=torch.float64, device=device)
