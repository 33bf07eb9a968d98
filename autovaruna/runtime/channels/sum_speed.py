"""Defines `measure_sums`: what the sums of a model's gradients over ranks cost, from the clock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor

from autovaruna.profiler.records import LinkCost
from autovaruna.runtime.channels.links import SMALL_BYTES, SMALL_TIMES, median_seconds
from autovaruna.runtime.gradient_sums.buckets import Sums
from autovaruna.runtime.worlds.world import World

LEAST_BYTES, MOST_BYTES = 4 << 20, 32 << 20
MOST_TENSORS = 2000
NUM_TIMES = 3


def measure_sums(world: World, sizes: Sequence[int], device: torch.device) -> LinkCost:
    """Measures sums over all ranks the way that gradients are summed. Collective.

    Small gradients travel together and are copied for it, large ones lie where they are, so a byte of the one costs
    more than a byte of the other; what counts is the model's own mixture.

    Args:
        world: The ranks.
        sizes: Bytes of each gradient; the first 32 MiB are summed, and all again where they are less than 4 MiB.
        device: Where this rank computes.

    Returns:
        The seconds of a sum of next to nothing for each rank that takes part, and the bytes that each rank of a ring
        sends in a second. A single rank sums nothing: no latency, infinite bandwidth.
    """
    if world.num_ranks == 1:
        return LinkCost(0.0, math.inf)
    ranks = tuple(range(world.num_ranks))
    tiny = torch.zeros(SMALL_BYTES // 4, device=device)
    gradients = [torch.zeros(size, dtype=torch.float32, device=device) for size in sample(sizes)]
    latency = _slowest(world, median_seconds([lambda: world.all_reduce(tiny, ranks)], SMALL_TIMES, device))
    seconds = _slowest(world, median_seconds([lambda: _sum(world, gradients, ranks)], NUM_TIMES, device))
    sent_bytes = 2 * (world.num_ranks - 1) / world.num_ranks * sum(each.nbytes for each in gradients)
    return LinkCost(latency / world.num_ranks, sent_bytes / max(seconds - latency, seconds / 2))


def sample(sizes: Sequence[int]) -> Iterator[int]:
    """Yields the numbers of elements of a step's first gradients, repeated where they are few."""
    total = num_tensors = 0
    for size in cycle([size for size in sizes if size] or [LEAST_BYTES]):
        is_enough = num_tensors >= len(sizes) and total >= LEAST_BYTES
        if is_enough or total >= MOST_BYTES or num_tensors == MOST_TENSORS:
            return
        taken = min(max(size, 4), MOST_BYTES - total)
        total, num_tensors = total + taken, num_tensors + 1
        yield -(-taken // 4)


def _sum(world: World, gradients: Sequence[Tensor], ranks: tuple[int, ...]) -> None:
    sums = Sums(world)
    for gradient in gradients:
        sums.add(gradient, ranks, is_contiguous=True)
    sums.finish()


def _slowest(world: World, seconds: float) -> float:
    return float(max(world.gather_objects(seconds, "measuring links: all-reduce")))
