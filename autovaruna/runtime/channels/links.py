"""Defines `measure_links`: what a message costs between two ranks, from the clock."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import torch

from autovaruna.profiler.own_clock import wait_for
from autovaruna.profiler.records import LinkCost
from autovaruna.runtime.layout import Layout
from autovaruna.runtime.transport.base import Pair
from autovaruna.runtime.worlds.world import World

logger = logging.getLogger(__name__)

TAG = (1 << 20) - 1
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
        world.send([outgoing], peer, TAG).wait()

    def back() -> None:
        if world.brings(peer, blanks):
            world.bring(blanks, peer, TAG).wait()
        else:
            world.receive([incoming], peer, TAG).wait()

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
