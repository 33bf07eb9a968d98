"""Says how many samples each micro-batch has: where ranks pass their own, those of a rank that has fewer are larger."""

from __future__ import annotations


def sizes_of_micro_batches(global_batch_size: int, num_micro_batches: int, num_groups: int) -> list[int]:
    """Returns the samples of each micro-batch, as a call cuts mini-batches that are equal.

    Args:
        global_batch_size: of all mini-batches.
        num_micro_batches: M, at least one for each mini-batch; m is a slice of the mini-batch m mod `num_groups`.
        num_groups: how many mini-batches there are.
    """
    sizes = []
    for m in range(num_micro_batches):
        group, place = m % num_groups, m // num_groups
        samples = global_batch_size // num_groups + (group < global_batch_size % num_groups)
        count = len(range(group, num_micro_batches, num_groups))
        sizes.append(samples // count + (place < samples % count))
    return sizes
