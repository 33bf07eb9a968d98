"""Says which samples each micro-batch has: micro-batch m is a slice of the mini-batch m mod G, of G mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def slices(mini_batch_sizes: Sequence[int], num_micro_batches: int) -> list[tuple[int, int]]:
    """Returns where each micro-batch starts in its mini-batch, and how many samples it has.

    The slices of a mini-batch are as equal as can be, the larger ones first. A mini-batch that has more slices than
    samples has empty ones; one without a slice has samples in none.

    Args:
        mini_batch_sizes: samples of each mini-batch.
        num_micro_batches: M, over all mini-batches.
    """
    num_groups = len(mini_batch_sizes)
    found = [(0, 0)] * num_micro_batches
    for group, samples in enumerate(mini_batch_sizes):
        places = range(group, num_micro_batches, num_groups)
        sizes = even_sizes(samples, len(places)) if places else []
        for m, start, size in zip(places, accumulate(sizes, initial=0), sizes, strict=False):
            found[m] = start, size
    return found


def even_sizes(num_samples: int, num_parts: int) -> list[int]:
    """Returns the sizes of parts that are as equal as can be, the larger ones first."""
    each, more = divmod(num_samples, num_parts)
    return [each + (place < more) for place in range(num_parts)]


def share_of(num_micro_batches: int, num_replicas: int, replica: int) -> int:
    """Returns how many of M micro-batches a replica of a stage runs."""
    return len(range(replica, num_micro_batches, num_replicas))
