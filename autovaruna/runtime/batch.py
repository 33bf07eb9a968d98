"""Cuts the mini-batches of all ranks into micro-batches, and finds this rank's own samples of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from autovaruna.errors import InputError
from autovaruna.schedule.pipeline import slices


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch: samples ``start`` to ``start + size`` of rank ``origin``'s group, and its weight in the loss."""

    index: int
    origin: int
    start: int
    size: int
    weight: float


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The micro-batches of one call, without empty ones.

    `groups` are the ranks that pass the same mini-batch, each with the rank that speaks for it first; a rank in none of
    them passes nothing that counts. Calls of the same sizes have the same object: what follows from it is kept.
    """

    micro_batches: dict[int, MicroBatch]
    groups: tuple[tuple[int, ...], ...]
    _owned: dict[int, list[MicroBatch]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def owned_by(self, rank: int) -> list[MicroBatch]:
        """Returns the micro-batches whose outputs belong to a rank, in the order of its mini-batch."""
        if rank not in self._owned:
            self._owned[rank] = [part for part in self.micro_batches.values() if self.has(rank, part)]
        return self._owned[rank]

    def has(self, rank: int, micro_batch: MicroBatch) -> bool:
        return rank in self.receivers(micro_batch)

    def receivers(self, micro_batch: MicroBatch) -> tuple[int, ...]:
        """Returns the ranks that passed a micro-batch and get its outputs."""
        return self.groups[micro_batch.index % len(self.groups)]

    def num_samples_of(self, rank: int) -> int:
        """Returns the samples that a rank passed: the end of its last micro-batch."""
        mine = self.owned_by(rank)
        return mine[-1].start + mine[-1].size if mine else 0

    @cached_property
    def sizes(self) -> frozenset[int]:
        return frozenset(part.size for part in self.micro_batches.values())

    @cached_property
    def num_samples(self) -> int:
        return sum(part.size for part in self.micro_batches.values())


@lru_cache(maxsize=64)  # steps differ in their numbers, rarely in their sizes
def cut_batch(
    mini_batch_sizes: tuple[int, ...], num_micro_batches: int, groups: tuple[tuple[int, ...], ...]
) -> GlobalBatch:
    """Cuts the mini-batches of all groups into micro-batches of as equal a size as can be, which count by samples.

    Micro-batch m is a slice of the mini-batch of group m mod G, whose ranks all passed it.

    Raises:
        InputError: there are fewer micro-batches than groups that passed samples.
    """
    sizes = [mini_batch_sizes[ranks[0]] for ranks in groups]
    total = sum(sizes)
    for ranks, size in zip(groups[num_micro_batches:], sizes[num_micro_batches:], strict=True):
        if size:
            raise InputError(
                f"num_micro_batches is {num_micro_batches}, but rank {ranks[0]} of {len(mini_batch_sizes)} "
                f"passes {size} samples of its own: expected at least {len(groups)} micro-batches, or "
                "inputs='replicated'."
            )
    parts = {
        m: MicroBatch(m, groups[m % len(groups)][0], start, size, size / total)
        for m, (start, size) in enumerate(slices(sizes, num_micro_batches))
        if size
    }
    return GlobalBatch(parts, groups)


@lru_cache(maxsize=64)
def weight_micro_batches(batch: GlobalBatch, weights: tuple[float, ...], is_sum: bool) -> GlobalBatch:
    """Weighs the losses of micro-batches: by one each if they are added, else as given, or by samples."""
    if is_sum:
        weights = (1.0,) * len(batch.micro_batches)
    elif not weights:
        return batch
    else:
        total = sum(weights)
        if not total > 0:
            raise InputError(f"micro_batch_weight gave {list(weights)}; expected numbers with a sum above zero.")
        weights = tuple(weight / total for weight in weights)
    parts = zip(batch.micro_batches.items(), weights, strict=True)
    return replace(batch, micro_batches={index: replace(part, weight=weight) for (index, part), weight in parts})


class OwnSamples:
    """The mini-batch of this rank, by input name, in micro-batches."""

    def __init__(
        self, inputs: Mapping[str, Tensor], batch_inputs: Collection[str], parts: Sequence[MicroBatch]
    ) -> None:
        self._inputs, self._batch_inputs, self._parts = inputs, batch_inputs, parts
        self._slices: dict[str, Mapping[int, Tensor]] = {}

    def of(self, part: MicroBatch, name: str) -> Tensor:
        """Returns a micro-batch's part of an input; all of one that is no batch."""
        slices = self._slices.get(name)
        if slices is None:
            whole = self._inputs[name].detach()
            if name not in self._batch_inputs:
                return whole
            pieces = torch.unsafe_split_with_sizes(whole, [each.size for each in self._parts])
            slices = self._slices[name] = {  # strides of dimensions of one element tell torch of an order in memory
                each.index: piece.contiguous().view(-1).view(piece.shape) if 1 in piece.shape else piece
                for each, piece in zip(self._parts, pieces, strict=True)
            }
        return slices[part.index].contiguous()
