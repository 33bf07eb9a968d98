"""Measures what messages between two ranks and sums of gradients over ranks cost, the way that tensors will take."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, pairwise
from statistics import median

import torch
from torch import Tensor

from autovaruna.profiler.measure import wait_for
from autovaruna.profiler.records import LinkCost
from autovaruna.runtime.mail import Layout
from autovaruna.runtime.sums import Sums
from autovaruna.runtime.transport.base import Pair
from autovaruna.runtime.world import World

logger = logging.getLogger(__name__)

LINK_TAG = (1 << 20) - 1
SMALL_BYTES, SMALL_TIMES = 256, 30
LARGE_BYTES, LARGE_TIMES = 1 << 20, 10
NUM_ATTEMPTS = 3


def measure_links(world: World, device: torch.device) -> tuple[LinkCost, LinkCost]:
    """Measures messages between neighbouring ranks, from where this rank computes. Collective.

    Returns:
        The link within a host, and the link between hosts. A kind of link that does not exist here costs what the
        other kind does; a single rank has nobody to talk to, so that all is free: no latency, infinite bandwidth.
    """
    if world.num_ranks == 1:
        return LinkCost(0.0, math.inf), LinkCost(0.0, math.inf)
    links: dict[Pair, LinkCost] = {}
    unclear = pairs_of(world.hosts)
    for _ in range(NUM_ATTEMPTS):
        seconds = measure_pairs(world, unclear, device)
        links.update({pair: link_of(*times) for pair, times in seconds.items()})
        unclear = [pair for pair, (small, large) in seconds.items() if large <= small]
    if unclear:
        logger.warning(
            "between ranks %s a message of %d bytes took longer than one of %d, %d times: other programs use the "
            "ranks' cores, so that the plan may be a poor one",
            ", ".join(f"{i} and {j}" for i, j in unclear),
            SMALL_BYTES,
            LARGE_BYTES,
            NUM_ATTEMPTS,
        )
    local = [link for (i, j), link in links.items() if world.hosts[i] == world.hosts[j]]
    remote = [link for (i, j), link in links.items() if world.hosts[i] != world.hosts[j]]
    return typical(local or remote), typical(remote or local)


def measure_pairs(world: World, pairs: list[Pair], device: torch.device) -> dict[Pair, tuple[float, float]]:
    """Returns the seconds of a small and a large message for each pair, the same on every rank."""
    mine: dict[Pair, tuple[float, float]] = {}
    for some in rounds_of(pairs):
        world.barrier("measuring links")
        for pair in some:
            if world.rank in pair:
                peer = sum(pair) - world.rank
                small = one_way_seconds(world, peer, SMALL_BYTES, SMALL_TIMES, device)
                mine[pair] = small, one_way_seconds(world, peer, LARGE_BYTES, LARGE_TIMES, device)
    everywhere: dict[Pair, tuple[float, float]] = {}
    for found in world.gather_objects(mine, "measuring links") if pairs else []:
        everywhere.update(found)
    return everywhere


def link_of(small_seconds: float, large_seconds: float) -> LinkCost:
    """Returns the link on which a small and a large message take these times.

    If the small one took longer, by chance, both are taken to have shared that bad luck: the large one's time is then
    all bandwidth.
    """
    if large_seconds <= small_seconds:
        return LinkCost(large_seconds, LARGE_BYTES / large_seconds)
    return LinkCost(small_seconds, (LARGE_BYTES - SMALL_BYTES) / (large_seconds - small_seconds))


def pairs_of(hosts: tuple[str, ...]) -> list[Pair]:
    """Returns the pairs to measure: each rank with the next, and with the next one on its host."""
    ranks = range(len(hosts))
    by_host = sorted(ranks, key=lambda rank: (hosts[rank], rank))
    nexts = [*pairwise(ranks), *pairwise(by_host)]
    return sorted({(min(pair), max(pair)) for pair in nexts})


def rounds_of(pairs: list[Pair]) -> list[list[Pair]]:
    """Returns the pairs in rounds where no rank is in two, as neighbouring stages talk at the same time."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        free = (some for some in rounds if all(set(pair).isdisjoint(other) for other in some))
        some = next(free, None)
        if some is None:
            rounds.append([pair])
        else:
            some.append(pair)
    return rounds


def one_way_seconds(world: World, peer: int, num_bytes: int, num_times: int, device: torch.device) -> float:
    """Returns the median seconds of half a message there and back, the way of `Mail`; the lower rank begins."""
    outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    blanks = [Layout((num_bytes,), (1,), torch.uint8)]

    def there() -> None:
        world.send([outgoing], peer, LINK_TAG).wait()

    def back() -> None:
        if world.brings(peer, blanks):
            world.bring(blanks, peer, LINK_TAG).wait()
        else:
            world.receive([incoming], peer, LINK_TAG).wait()

    acts = (there, back) if world.rank < peer else (back, there)
    return median_seconds(acts, num_times, device) / 2


def median_seconds(acts: Sequence[Callable[[], None]], num_times: int, device: torch.device) -> float:
    """Returns the median seconds of all `acts`, each to its end on a device, after two rounds that do not count."""
    seconds = []
    wait = wait_for(device)
    for _ in range(num_times + 2):
        start = time.perf_counter()
        for act in acts:
            act()
            wait()
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def typical(links: list[LinkCost]) -> LinkCost:
    """Returns the medians over links."""
    return LinkCost(median(link.latency_seconds for link in links), median(link.bytes_per_second for link in links))


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
    gradients = [torch.zeros(size, dtype=torch.float32, device=device) for size in sample_of_gradients(sizes)]
    latency = _slowest(world, median_seconds([lambda: world.all_reduce(tiny, ranks)], SMALL_TIMES, device))
    seconds = _slowest(world, median_seconds([lambda: _sum(world, gradients, ranks)], NUM_TIMES, device))
    sent_bytes = 2 * (world.num_ranks - 1) / world.num_ranks * sum(each.nbytes for each in gradients)
    return LinkCost(latency / world.num_ranks, sent_bytes / max(seconds - latency, seconds / 2))


def sample_of_gradients(sizes: Sequence[int]) -> Iterator[int]:
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
