"""Finds what this rank is on: its number, device, memory and links."""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from autovaruna.config.settings import Settings
from autovaruna.errors import ConfigError
from autovaruna.profiler.records import LinkCost
from autovaruna.runtime.buckets import GradientSums
from autovaruna.runtime.environment import get_world, local_rank_in
from autovaruna.runtime.transport.base import Layout, Pair
from autovaruna.runtime.transport.torch_channel import neighbours
from autovaruna.runtime.world import World

logger = logging.getLogger(__name__)
_FIRST = torch.device("cuda", 0)


def get_rank() -> int:
    """Returns the number of this rank; 0 without a launcher."""
    return get_world().rank


def get_world_size() -> int:
    """Returns the number of ranks; 1 without a launcher."""
    return get_world().num_ranks


def barrier() -> None:
    """Returns once every rank has come. Collective."""
    get_world().barrier("barrier")


def find_device(model: nn.Module, settings: Settings) -> torch.device:
    """Returns where this rank computes: where the setting says or the model is, or a GPU for one on ``meta``."""
    if settings.device != "auto":
        return _named(settings.device)
    tensors = [*model.parameters(), *model.buffers()]
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_meta))
    is_on_meta = bool(tensors) and not devices
    if devices == [_FIRST] or (is_on_meta and torch.cuda.is_available()):
        return _own_gpu()
    return devices[0] if devices else torch.device("cpu")


def bring_to_own_device(model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings) -> torch.device:
    """Moves what is elsewhere of a model, and of its optimizer's state, to where this rank computes; returns that.

    Parameters stay the same objects, so the optimizer's are the model's. What is on ``meta`` stays there.
    """
    device = find_device(model, settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    before = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta} - {device}
    if not before or (settings.device == "auto" and before != {_FIRST}):
        return device

    def moves(value: object) -> bool:
        """Whether a part of an optimizer's state goes along; counts of steps on the CPU are to stay there."""
        return isinstance(value, Tensor) and value.device in before and (value.is_cuda or value.dim() > 0)

    logger.info("the model goes from %s to %s, where this rank computes", ", ".join(map(str, before)), device)
    model._apply(lambda each: each if each.is_meta else each.to(device))  # type: ignore[no-untyped-call]
    for state in optimizer.state.values() if optimizer is not None else ():
        state.update({name: each.to(device) for name, each in state.items() if moves(each)})
    return device


def on_own_gpu(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Returns inputs on the GPU of this rank; those that a script has put on another one are copied."""
    if device.type != "cuda":
        return tensors
    return [each.to(device) if each.is_cuda and each.device != device else each for each in tensors]


def _own_gpu() -> torch.device:
    """Returns the current GPU if the script has chosen one, else the one with this rank's number on its host."""
    current, number = torch.cuda.current_device(), local_rank_in(os.environ)
    if current == 0 and number is not None:
        return torch.device("cuda", number % torch.cuda.device_count())
    return torch.device("cuda", current)


def _named(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            torch.cuda.init()
            return _own_gpu()
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device is {name!r}, which cannot be used here: {str(error).splitlines()[0]}. Expected auto, cpu, cuda, "
            "or cuda:0 and so on."
        ) from error


_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = 1, -1, -3
_PROCESS_BYTES = 16 << 20
"""What a process holds on the CPU beside tensors, once it has traced a model, where the system does not say."""
_LATER_BYTES = 5 << 20
"""What planning and splitting add to a process that has traced, measured and sent: pages of code, graphs of stages."""
_FRAGMENTATION, _FRAGMENTATION_WITH_CACHE, _FRAGMENTATION_OF_CUDA = 1.35, 1.75, 1.2
"""Bytes that an allocator takes for each byte that micro-batches make and free.

The first two are of the C library's heap, found from the settings of `benchmarks/prediction.py`: with
``GLIBC_TUNABLES=glibc.malloc.tcache_count=0``, and without, where small pieces that the library keeps for itself lie
between holes. That of CUDA's caching allocator was 1.1 for gigabytes of them and up to 2 for a hundred megabytes."""
MAPPED_BYTES = 32 << 20
"""Tensors of this and more lie outside the heap, and go back to the system at once; the most that glibc allows."""
_SMALL_BYTES = 1 << 16  # tensors of less than this are few bytes beside others
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold", "glibc.malloc.mmap_max")
"""What a user who sets these in ``GLIBC_TUNABLES`` has decided; ``glibc.malloc.tcache_count=0`` is no such thing."""


def rank_memory(world: World, device: torch.device, settings: Settings) -> float:
    """Returns the bytes that this rank may use: the setting, or its share of what the device has, less the margin."""
    num_sharing = world.hosts.count(world.hosts[world.rank])
    total = float(settings.memory_limit_bytes)
    if not total and device.type == "cuda":
        num_sharing_gpu = -(-num_sharing // torch.cuda.device_count())
        total = float(torch.cuda.get_device_properties(device).total_memory) / num_sharing_gpu
    return (total or host_memory() / num_sharing) * (1.0 - settings.memory_margin)


def host_memory() -> float:
    """Returns the bytes of memory that this host has."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def resident_bytes(device: torch.device) -> float | None:
    """Returns what this process holds of the memory where it computes; None if the system does not say.

    On the CPU that is the resident set without what the heap could give back.
    """
    if device.type == "cuda":
        gc.collect()
        return float(torch.cuda.memory_allocated(device))
    give_back_freed_memory()
    try:
        return float(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def process_bytes_of(
    world: World, device: torch.device, resident_before: float | None, batch_bytes: float
) -> tuple[float, ...]:
    """Returns what each rank holds beside its stages: its mini-batch, code and graphs, workspaces of a GPU. Collective.

    On the CPU samples go to other ranks through memory that both share, which counts for both; what measuring the links
    has touched of it serves again.
    """
    now = resident_bytes(device)
    growth = None if now is None or resident_before is None else max(now - resident_before, 0.0)
    mine = batch_bytes
    if device.type == "cuda":
        mine += growth or 0.0
    else:
        on_its_way = max(batch_bytes - _shared_bytes(), 0.0) if world.num_ranks > 1 else 0.0
        mine += (_PROCESS_BYTES if growth is None else growth) + on_its_way + _LATER_BYTES
    return tuple(world.gather_objects(mine, "measuring what processes hold"))


def _shared_bytes() -> float:
    """Returns what is resident of the memory that this process shares with others; 0 if the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem:")), 0.0)


def fragmentation(device: torch.device) -> float:
    """Returns the bytes that the allocator takes for each; 1 if the user has every tensor mapped for itself."""
    if device.type == "cuda":
        return _FRAGMENTATION_OF_CUDA
    tunables = dict(each.partition("=")[::2] for each in os.environ.get("GLIBC_TUNABLES", "").split(":"))
    mapped_from = tunables.get("glibc.malloc.mmap_threshold") or os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    if mapped_from.isdigit() and int(mapped_from) <= _SMALL_BYTES:
        return 1.0
    return _FRAGMENTATION if tunables.get("glibc.malloc.tcache_count") == "0" else _FRAGMENTATION_WITH_CACHE


def keep_freed_memory() -> None:
    """Lets the C library keep what tensors free: a step asks for the same memory as the one before it.

    Giving it back and getting it again takes up to a sixth of a step. Small pieces join their free neighbours at once:
    those that wait to be used again keep tensors out of the holes beside them. What the user has set counts.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    is_set = any(name.startswith("MALLOC_") for name in os.environ) or any(name in tunables for name in _TUNABLES)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not is_set:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MXFAST, 0)


def give_back_freed_memory() -> None:
    """Gives memory that tracing and measuring have freed back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


LINK_TAG = (1 << 20) - 1
SHORT_BYTES, SHORT_TIMES = 256, 30
LONG_BYTES, LONG_TIMES = 1 << 20, 10
LINK_ATTEMPTS = 3
LEAST_SUM_BYTES, MOST_SUM_BYTES = 4 << 20, 32 << 20
MOST_SUM_TENSORS = 2000
SUM_TIMES = 3


def measure_links(world: World, device: torch.device) -> tuple[LinkCost, LinkCost]:
    """Measures messages between neighbouring ranks, from where this rank computes. Collective.

    Returns the link within a host, and that between hosts; a kind that does not exist here costs what the other does.
    """
    if world.num_ranks == 1:
        return LinkCost(0.0, math.inf), LinkCost(0.0, math.inf)
    links: dict[Pair, LinkCost] = {}
    unclear = neighbours(world.hosts)
    for _ in range(LINK_ATTEMPTS):
        seconds = _measure_pairs(world, unclear, device)
        links.update({pair: _link_of(*times) for pair, times in seconds.items()})
        unclear = [pair for pair, (small, large) in seconds.items() if large <= small]
    if unclear:
        logger.warning(
            "between ranks %s a message of %d bytes took longer than one of %d, %d times: other programs use the "
            "ranks' cores, so that the plan may be a poor one",
            ", ".join(f"{i} and {j}" for i, j in unclear),
            SHORT_BYTES,
            LONG_BYTES,
            LINK_ATTEMPTS,
        )
    local = [link for (i, j), link in links.items() if world.hosts[i] == world.hosts[j]]
    remote = [link for (i, j), link in links.items() if world.hosts[i] != world.hosts[j]]
    return _typical(local or remote), _typical(remote or local)


def _measure_pairs(world: World, pairs: list[Pair], device: torch.device) -> dict[Pair, tuple[float, float]]:
    """Returns the seconds of a small and a large message for each pair, the same on every rank."""
    mine: dict[Pair, tuple[float, float]] = {}
    for some in rounds_of(pairs):
        world.barrier("measuring links")
        for pair in some:
            if world.rank in pair:
                peer = sum(pair) - world.rank
                small = one_way_seconds(world, peer, SHORT_BYTES, SHORT_TIMES, device)
                mine[pair] = small, one_way_seconds(world, peer, LONG_BYTES, LONG_TIMES, device)
    everywhere = world.gather_objects(mine, "measuring links") if pairs else []
    return {pair: seconds for found in everywhere for pair, seconds in found.items()}


def _link_of(small_seconds: float, large_seconds: float) -> LinkCost:
    """Returns the link on which a small and a large message take these times.

    If the small one took longer, by chance, the large one's time is all bandwidth.
    """
    if large_seconds <= small_seconds:
        return LinkCost(large_seconds, LONG_BYTES / large_seconds)
    return LinkCost(small_seconds, (LONG_BYTES - SHORT_BYTES) / (large_seconds - small_seconds))


def rounds_of(pairs: list[Pair]) -> list[list[Pair]]:
    """Returns the pairs in rounds where no rank is in two, as neighbouring stages talk at the same time."""
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
    """Returns the median seconds of half a message there and back, the way of `Mail`; the lower rank begins."""
    outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    blanks = [Layout((num_bytes,), (1,), torch.uint8)]

    def there() -> None:
        world.send([outgoing], peer, LINK_TAG).wait()

    def back() -> None:
        if world.is_eager(peer, blanks):
            world.receive_eager(blanks, peer, LINK_TAG).wait()
        else:
            world.receive([incoming], peer, LINK_TAG).wait()

    acts = (there, back) if world.rank < peer else (back, there)
    return _median_seconds(acts, num_times, device) / 2


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
    return LinkCost(median(link.latency_seconds for link in links), median(link.bytes_per_second for link in links))


def measure_sums(world: World, sizes: Sequence[int], device: torch.device) -> LinkCost:
    """Measures sums over all ranks the way that gradients, of `sizes` bytes each, are summed. Collective.

    Small gradients travel together and are copied for it, large ones lie where they are. The first 32 MiB are summed,
    and all again where they are less than 4 MiB. Returns the latency for each rank that takes part, and the bytes that
    each rank of a ring sends in a second.
    """
    if world.num_ranks == 1:
        return LinkCost(0.0, math.inf)
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
        return float(max(world.gather_objects(seconds, "measuring links: all-reduce")))

    latency = slowest(lambda: world.all_reduce(tiny, ranks), SHORT_TIMES)
    seconds = slowest(sum_all, SUM_TIMES)
    sent_bytes = 2 * (world.num_ranks - 1) / world.num_ranks * sum(each.nbytes for each in gradients)
    return LinkCost(latency / world.num_ranks, sent_bytes / max(seconds - latency, seconds / 2))


def sample_of_gradients(sizes: Sequence[int]) -> Iterator[int]:
    """Yields the numbers of elements of a step's first gradients, repeated where they are few."""
    total = num_tensors = 0
    for size in cycle([size for size in sizes if size] or [LEAST_SUM_BYTES]):
        is_enough = num_tensors >= len(sizes) and total >= LEAST_SUM_BYTES
        if is_enough or total >= MOST_SUM_BYTES or num_tensors == MOST_SUM_TENSORS:
            return
        taken = min(max(size, 4), MOST_SUM_BYTES - total)
        total, num_tensors = total + taken, num_tensors + 1
        yield -(-taken // 4)
