"""Times messages between neighbouring ranks and sums over all ranks, as the planner needs them.

Those between hosts are measured once a week, and kept by the names of the hosts.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from itertools import chain, cycle
from statistics import median

import torch

from autovaruna.profiler.cache import LinkCache
from autovaruna.profiler.measure import own_clock
from autovaruna.profiler.records import LinkCost
from autovaruna.ranks.buckets import GradientSums
from autovaruna.ranks.torch_channel import neighbours
from autovaruna.ranks.transport.base import Pair, Pending
from autovaruna.ranks.transport.layout import Layout
from autovaruna.ranks.world import World

logger = logging.getLogger(__name__)
LINK_TAG = (1 << 20) - 1
SHORT_BYTES, SHORT_TIMES = 256, 30
LONG_BYTES, LONG_TIMES = 1 << 20, 10
LINK_ATTEMPTS = 3
BUSY_BYTES, BUSY_TIMES, BUSY_PARTS = 1 << 18, 6, 8
MOST_BUSY_SECONDS = 0.02
LEAST_SUM_BYTES, MOST_SUM_BYTES = 4 << 20, 32 << 20
MOST_SUM_TENSORS = 2000
SUM_TIMES = 3


def measure_links(world: World, device: torch.device, cache: LinkCache | None = None) -> tuple[LinkCost, LinkCost]:
    """Measures messages between neighbouring ranks, from where this rank computes. Collective.

    Returns the link within a host, and that between hosts; a kind that does not exist here costs what the other does.
    `cache` has those between hosts, on ranks that read one.
    """
    if world.num_ranks == 1:
        return LinkCost(0.0, math.inf), LinkCost(0.0, math.inf)
    pairs, hosts = neighbours(world.hosts), world.hosts
    names = {(i, j): _name(world, device, *sorted({hosts[i], hosts[j]})) for i, j in pairs if hosts[i] != hosts[j]}
    known = _known_links(world, names.values(), cache)
    links = {pair: known[name] for pair, name in names.items() if name in known}
    fresh = _measured_links(world, [pair for pair in pairs if pair not in links], device)
    if cache:
        cache.write({names[pair]: link for pair, link in fresh.items() if pair in names})
    links |= fresh
    local = [link for (i, j), link in links.items() if hosts[i] == hosts[j]]
    remote = [link for (i, j), link in links.items() if hosts[i] != hosts[j]]
    return _typical(local or remote), _typical(remote or local)


def _name(world: World, device: torch.device, *of: str) -> str:
    """Returns the name of a link, or of sums, in the cache: how it goes, and of what."""
    return " ".join([type(world.transport).__name__, type(world.carrier).__name__, device.type, *of])


def _known_links(world: World, names: Iterable[str], cache: LinkCache | None) -> dict[str, LinkCost]:
    """Returns the links that any rank's cache has, the same on all. Collective."""
    wanted = dict.fromkeys(names)
    mine = cache.read(wanted) if cache else {}
    rows = world.gather_objects(mine, "reading saved measurements") if wanted else []
    return {name: link for row in rows for name, link in row.items()}


def _measured_links(world: World, pairs: list[Pair], device: torch.device) -> dict[Pair, LinkCost]:
    """Returns the links of some pairs, measured now, the same on every rank. Collective."""
    links: dict[Pair, LinkCost] = {}
    unclear = pairs
    for _ in range(LINK_ATTEMPTS):
        seconds = _measure_pairs(world, unclear, device)
        links.update({pair: _link_of(*times) for pair, times in seconds.items()})
        unclear = [pair for pair, (small, large, _) in seconds.items() if large <= small]
    if unclear:
        logger.warning(
            "between ranks %s a message of %d bytes took longer than one of %d, %d times: other programs use the "
            "ranks' cores, so that the plan may be a poor one",
            ", ".join(f"{i} and {j}" for i, j in unclear),
            SHORT_BYTES,
            LONG_BYTES,
            LINK_ATTEMPTS,
        )
    return links


def _measure_pairs(world: World, pairs: list[Pair], device: torch.device) -> dict[Pair, tuple[float, float, float]]:
    """Returns the seconds of a small message, of a large one both ways at once, and those in which between hosts it
    keeps a rank busy, for each pair, on every rank."""
    mine: dict[Pair, tuple[float, float, float]] = {}
    for some in rounds_of(pairs):
        world.barrier("measuring links")
        for pair in some:
            if world.rank in pair:
                peer = sum(pair) - world.rank
                small = one_way_seconds(world, peer, SHORT_BYTES, SHORT_TIMES, device)
                large = both_ways_seconds(world, peer, LONG_BYTES, LONG_TIMES, device)
                is_far = device.type == "cpu" and world.transport.are_apart(pair)
                mine[pair] = small, large, busy_seconds(world, peer, large, device) if is_far else 0.0
    own = [pair for pair in pairs if max(pair) == world.rank]  # each pair once
    rows = world.gather_numbers(chain(*map(mine.__getitem__, own)), "measuring links") if pairs else []
    places = [iter(zip(row[::3], row[1::3], row[2::3], strict=True)) for row in rows]
    return {pair: next(places[max(pair)]) for pair in pairs}


def _link_of(small_seconds: float, large_seconds: float, busy_seconds: float) -> LinkCost:
    """Returns the link on which a small and a large message take these times.

    If the small one took longer, by chance, the large one's time is all bandwidth.
    """
    busy = busy_seconds / (2 * LONG_BYTES)
    if large_seconds <= small_seconds:
        return LinkCost(large_seconds, LONG_BYTES / large_seconds, busy)
    return LinkCost(small_seconds, (LONG_BYTES - SHORT_BYTES) / (large_seconds - small_seconds), busy)


def rounds_of(pairs: list[Pair]) -> list[list[Pair]]:
    """Returns the pairs in rounds, in each of which a rank is in one pair at most: they are timed at once."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        for some in rounds:
            if all(set(pair).isdisjoint(other) for other in some):
                some.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds


def one_way_seconds(world: World, peer: int, num_bytes: int, num_times: int, device: torch.device) -> float:
    """Returns half the median seconds of a message there and back, sent as `Mail` does; the lower rank begins."""
    send, receive = _ends(world, peer, num_bytes, device)

    def there() -> None:
        send().wait()

    acts = (there, receive) if world.rank < peer else (receive, there)
    return _median_seconds(acts, num_times, device) / 2


def both_ways_seconds(world: World, peer: int, num_bytes: int, num_times: int, device: torch.device) -> float:
    """Returns the median seconds of a message there and one back at once: as activations meet gradients."""
    return _median_seconds([_swap(world, peer, num_bytes, device)], num_times, device)


def _swap(world: World, peer: int, num_bytes: int, device: torch.device) -> Callable[[], None]:
    """Returns what sends a message there and receives one back at once."""
    send, receive = _ends(world, peer, num_bytes, device)

    def swap() -> None:
        sent = send()
        receive()
        sent.wait()

    return swap


def busy_seconds(world: World, peer: int, large_seconds: float, device: torch.device) -> float:
    """Returns the seconds in which a large message, there and back, keeps this rank from computing.

    By its own clock: it computes, in some parts as a step does, alone and beside a shorter message both ways, three
    times as long as that takes.
    """
    outgoing, incoming = (torch.zeros(BUSY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    matrix, now, share = torch.zeros(128, 128, device=device), own_clock(device), BUSY_BYTES / LONG_BYTES
    meet = _swap(world, peer, SHORT_BYTES, device)

    def compute(num_times: int) -> float:
        started = now()
        for _ in range(num_times):
            torch.tanh(matrix @ matrix)
        return now() - started

    num_times, seconds = min(3 * share * large_seconds, MOST_BUSY_SECONDS) / (compute(100) / 100), list[float]()
    for turn in range(2 * BUSY_TIMES):
        meet()
        started, under_way = now(), list[Pending]()
        if turn % 2:
            under_way += world.receive([incoming], peer, LINK_TAG), world.send([outgoing], peer, LINK_TAG)
        for _ in range(BUSY_PARTS):
            compute(round(num_times / BUSY_PARTS))
            world.progress()
        seconds.append(now() - started)
        for message in under_way:
            message.wait()
    return max(0.0, median(seconds[3::2]) - median(seconds[2::2])) / share


def _ends(
    world: World, peer: int, num_bytes: int, device: torch.device
) -> tuple[Callable[[], Pending], Callable[[], None]]:
    """Returns what starts to send a message, and what receives one, as `Mail` does."""
    outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    blanks = [Layout((num_bytes,), (1,), torch.uint8)]

    def receive() -> None:
        if world.is_eager(peer, blanks):
            world.receive_eager(blanks, peer, LINK_TAG).wait()
        else:
            world.receive([incoming], peer, LINK_TAG).wait()

    return lambda: world.send([outgoing], peer, LINK_TAG), receive


def _median_seconds(acts: Sequence[Callable[[], None]], num_times: int, device: torch.device) -> float:
    """Returns the median seconds of all `acts`, each to its end on a device, after two rounds that do not count."""
    seconds = []
    for _ in range(num_times + 2):
        start = time.perf_counter()
        for act in acts:
            act()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def _typical(links: list[LinkCost]) -> LinkCost:
    return LinkCost(*(median(numbers) for numbers in zip(*map(astuple, links), strict=True)))


def measure_sums(world: World, sizes: Sequence[int], device: torch.device, cache: LinkCache | None = None) -> LinkCost:
    """Measures sums over all ranks, as gradients of `sizes` bytes each are summed. Collective.

    Returns the latency for each rank that takes part, and the bytes that each rank of a ring sends in a second. `cache`
    has those of several hosts, on ranks that read one.
    """
    if world.num_ranks == 1:
        return LinkCost(0.0, math.inf)
    of = hashlib.sha256(repr((world.hosts, list(sizes))).encode()).hexdigest()[:16]
    name = _name(world, device, "sums", of)
    is_kept = len(set(world.hosts)) > 1
    known = _known_links(world, [name] if is_kept else [], cache)
    if name not in known:
        known[name] = _measured_sums(world, sizes, device)
        if cache and is_kept:
            cache.write(known)
    return known[name]


def _measured_sums(world: World, sizes: Sequence[int], device: torch.device) -> LinkCost:
    """Returns what `measure_sums` does, measured now."""
    ranks = tuple(range(world.num_ranks))
    tiny = torch.zeros(SHORT_BYTES // 4, device=device)
    gradients = [torch.zeros(size, dtype=torch.float32, device=device) for size in sample_of_gradients(sizes)]

    def sum_all() -> None:
        sums = GradientSums(world)
        for gradient in gradients:
            sums.add(gradient, ranks, is_contiguous=True)
        sums.finish()

    def slowest(act: Callable[[], None], num_times: int) -> float:
        seconds = _median_seconds([act], num_times, device)
        return max(number for (number,) in world.gather_numbers((seconds,), "measuring links: all-reduce"))

    latency = slowest(lambda: world.all_reduce(tiny, ranks), SHORT_TIMES)
    seconds = slowest(sum_all, SUM_TIMES)
    sent_bytes = 2 * (world.num_ranks - 1) / world.num_ranks * sum(each.nbytes for each in gradients)
    return LinkCost(latency / world.num_ranks, sent_bytes / max(seconds - latency, seconds / 2))


def sample_of_gradients(sizes: Sequence[int]) -> Iterator[int]:
    """Yields the numbers of elements of a step's first gradients, 4 to 32 MiB: repeated where they are less."""
    total = num_tensors = 0
    for size in cycle([size for size in sizes if size] or [LEAST_SUM_BYTES]):
        is_enough = num_tensors >= len(sizes) and total >= LEAST_SUM_BYTES
        if is_enough or total >= MOST_SUM_BYTES or num_tensors == MOST_SUM_TENSORS:
            return
        taken = min(max(size, 4), MOST_SUM_BYTES - total)
        total, num_tensors = total + taken, num_tensors + 1
        yield -(-taken // 4)
