"""Cuts the global batch into micro-batches and says whose samples each one holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autovaruna.errors import InputError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch: samples ``start`` to ``start + size`` of the mini-batch of rank ``origin``.

    `share` is the weight of its loss in the loss of the global batch.
    """

    index: int
    origin: int
    start: int
    size: int
    share: float


@dataclass(frozen=True)
class GlobalBatch:
    """The micro-batches of one call, without empty ones."""

    micro_batches: dict[int, MicroBatch]
    is_replicated: bool

    def owned_by(self, rank: int) -> list[MicroBatch]:
        """Returns the micro-batches whose outputs belong to a rank, in the order of its mini-batch."""
        return [part for part in self.micro_batches.values() if self.is_replicated or part.origin == rank]

    def receivers(self, micro_batch: MicroBatch, num_ranks: int) -> list[int]:
        """Returns the ranks that get the outputs of a micro-batch."""
        return list(range(num_ranks)) if self.is_replicated else [micro_batch.origin]

    @property
    def num_samples(self) -> int:
        """Samples in the global batch."""
        return sum(part.size for part in self.micro_batches.values())


def cut_batch(mini_batch_sizes: Sequence[int], num_micro_batches: int, is_replicated: bool) -> GlobalBatch:
    """Cuts the mini-batches of all ranks into micro-batches of as equal a size as can be.

    Args:
        mini_batch_sizes: Samples that each rank passed.
        num_micro_batches: M, of the whole global batch.
        is_replicated: Whether every rank passed the same batch.

    Returns:
        The micro-batches; `share` is the share of samples until `weigh` says otherwise.

    Raises:
        InputError: no rank passed a sample, or there are fewer micro-batches than ranks that passed some.
    """
    num_ranks = len(mini_batch_sizes)
    if is_replicated:
        counts, sizes = [num_micro_batches], [mini_batch_sizes[0]]
    else:
        counts = [len(range(rank, num_micro_batches, num_ranks)) for rank in range(num_ranks)]
        sizes = list(mini_batch_sizes)
    total = sum(sizes)
    if total == 0:
        raise InputError("Every rank passed an empty batch; expected at least one sample on one rank.")
    parts: dict[int, MicroBatch] = {}
    for rank, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        if size and not count:
            raise InputError(
                f"num_micro_batches is {num_micro_batches}, but rank {rank} of {num_ranks} passes {size} samples of "
                f"its own: expected at least {num_ranks} micro-batches, or inputs='replicated'."
            )
        start = 0
        for place in range(count):
            length = size // count + (place < size % count)
            index = place if is_replicated else rank + place * num_ranks
            if length:
                parts[index] = MicroBatch(index, rank, start, length, length / total)
            start += length
    return GlobalBatch(dict(sorted(parts.items())), is_replicated)


def weigh(batch: GlobalBatch, weights: Sequence[float], is_sum: bool) -> GlobalBatch:
    """Gives each micro-batch its share of the loss.

    Args:
        batch: The batch.
        weights: One number for each micro-batch, in order; empty: its samples.
        is_sum: Whether losses are added rather than averaged.

    Raises:
        InputError: the weights do not add up to more than zero.
    """
    if is_sum:
        shares = [1.0] * len(batch.micro_batches)
    elif not weights:
        return batch
    else:
        total = sum(weights)
        if not total > 0:
            raise InputError(f"micro_batch_weight gave {list(weights)}; expected numbers with a sum above zero.")
        shares = [weight / total for weight in weights]
    parts = zip(batch.micro_batches.items(), shares, strict=True)
    return replace(batch, micro_batches={index: replace(part, share=share) for (index, part), share in parts})
