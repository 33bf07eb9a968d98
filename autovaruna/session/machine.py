"""Finds out what the planner must know of the machine and of the optimizer: memory, links, and speeds of ranks."""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, median_low

import torch

from autovaruna.config.settings import Settings
from autovaruna.errors import PlanError
from autovaruna.graph.random import untouched_generator
from autovaruna.graph.records import Graph
from autovaruna.profiler.measure import Pace, call_seconds, measure_pace
from autovaruna.profiler.optimizer import measure_step, state_factor
from autovaruna.profiler.records import Cluster, OptimizerCost
from autovaruna.runtime.transport.links import measure_links, measure_sums
from autovaruna.runtime.transport.torch_channel import open_to_measure
from autovaruna.runtime.world import World

_NOISE = 1.25
"""Speeds whose ratio is less than this count as equal."""


class SpeedWatch:
    """Looks at the speeds of all ranks at several moments.

    Args:
        world: The ranks.
        device: Where this rank computes.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.world = world
        self.device = device
        self._looks: list[list[Pace]] = []

    def look(self) -> None:
        """Measures every rank now. Collective."""
        self._looks.append(self.world.gather_objects(measure_pace(self.device), "measuring speeds"))

    def speeds(self) -> tuple[float, ...]:
        """Returns the speed of each rank by all looks so far: what a step gets.

        Speed 1 is that of short samples on the typical rank.
        """
        return lasting([[_typical(look) / pace.mean for pace in look] for look in self._looks])

    def speeds_of_samples(self) -> tuple[float, ...]:
        """Returns the same for what takes so little time that other programs seldom come between."""
        return lasting([[_typical(look) / pace.typical for pace in look] for look in self._looks])


def lasting(looks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns the speeds of ranks by what was seen at each look.

    A rank differs from the typical one, and that one from speed 1, if it does so at every look, in the same direction
    and by more than noise: another program that takes turns on its core makes it look slower once, and is gone when
    the model trains.
    """
    middles = [sorted(look)[len(look) // 2] for look in looks]
    to_middle = [[speed / middle for speed in look] for look, middle in zip(looks, middles, strict=True)]
    return tuple(_lasting(middles) * _lasting(speeds) for speeds in zip(*to_middle, strict=True))


def _typical(look: Sequence[Pace]) -> float:
    return sorted(pace.typical for pace in look)[len(look) // 2]


def _lasting(speeds: Sequence[float]) -> float:
    is_slower = all(speed <= 1 / _NOISE for speed in speeds)
    is_faster = all(speed >= _NOISE for speed in speeds)
    return median(speeds) if is_slower or is_faster else 1.0


logger = logging.getLogger(__name__)
_CALLS_OF_AN_INSTRUCTION = 10.0
"""What the executor adds to an instruction, counted in calls of an empty piece; found from steps of tiny models."""
_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = 1, -1, -3
_PROCESS_BYTES = 16 << 20
"""What a process holds on the CPU beside tensors, once it has traced a model, where the system does not say."""
_LATER_BYTES = 5 << 20
"""What planning and splitting add to a process that has traced, measured and sent: pages of code, graphs of stages."""
_FRAGMENTATION, _FRAGMENTATION_WITH_CACHE, _FRAGMENTATION_OF_CUDA = 1.35, 1.75, 1.08
"""Bytes that an allocator takes for each byte that micro-batches make and free.

The first two are of the C library's heap, found from the settings of `benchmarks/prediction.py`: with
``GLIBC_TUNABLES=glibc.malloc.tcache_count=0``, and without, where small pieces that the library keeps for itself lie
between holes. That of CUDA's caching allocator is an assumption."""
MAPPED_BYTES = 32 << 20
"""Tensors of this and more lie outside the heap, and go back to the system at once; the most that glibc allows."""
_SMALL_BYTES = 1 << 16
"""Tensors of less than this are few bytes beside others."""
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold", "glibc.malloc.mmap_max")
"""What a user who sets these in ``GLIBC_TUNABLES`` has decided; ``glibc.malloc.tcache_count=0`` is no such thing."""


def rank_memory(world: World, device: torch.device, settings: Settings) -> float:
    """Returns the bytes that this rank may use: the setting, or its share of what the device has, less the margin."""
    total = float(settings.memory_limit_bytes) or _device_memory(world, device)
    return total * (1.0 - settings.memory_margin)


def resident_bytes() -> float:
    """Returns the resident set of this process without what the heap could give back; 0 if the system does not say."""
    give_back_freed_memory()
    try:
        return float(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0.0


def _process_bytes(world: World, device: torch.device, resident_before: float, batch_bytes: float) -> tuple[float, ...]:
    """Returns what each rank holds beside its stages: its mini-batch, and on the CPU code and graphs. Collective.

    Ranks trace the same model, but each measures other parts of it, for which libraries keep memory. On the CPU the
    samples of a mini-batch go to other ranks through memory that both share, which counts for both; what measuring the
    links has touched of it serves again.
    """
    mine = batch_bytes
    if device.type == "cpu":
        growth = max(resident_bytes() - resident_before, 0.0) if resident_before else float(_PROCESS_BYTES)
        on_its_way = max(batch_bytes - _shared_bytes(), 0.0) if world.num_ranks > 1 else 0.0
        mine += growth + on_its_way + _LATER_BYTES
    return tuple(world.gather_objects(mine, "measuring what processes hold"))


def _shared_bytes() -> float:
    """Returns what is resident of the memory that this process shares with others; 0 if the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem:")), 0.0)


def _device_memory(world: World, device: torch.device) -> float:
    num_sharing = Counter(world.hosts)[world.hosts[world.rank]]
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return float(total) / -(-num_sharing // torch.cuda.device_count())
    return host_memory() / num_sharing


def host_memory() -> float:
    """Returns the bytes of memory that this host has."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def describe_cluster(
    watch: SpeedWatch, graph: Graph, settings: Settings, resident_before: float = 0.0, batch_bytes: float = 0.0
) -> Cluster:
    """Measures links, the way that tensors will take, and speeds. Collective.

    A memory limit that the user sets is for what the model brings: what a process holds beside it comes on top.

    Args:
        watch: Of the ranks' speeds.
        graph: The model's, whose gradients are summed.
        settings: The settings.
        resident_before: What `resident_bytes` said before the model was traced; 0: not known.
        batch_bytes: What the caller's mini-batch takes on the device.
    """
    world, device = watch.world, watch.device
    open_to_measure(settings.channel, world, device)
    local, remote = measure_links(world, device)
    sums = measure_sums(world, [each.num_bytes for each in graph.parameters if each.needs_gradient], device)
    own_process_bytes = _process_bytes(world, device, resident_before, batch_bytes)  # with what messages leave
    process_bytes = max(own_process_bytes)
    watch.look()
    overhead = _CALLS_OF_AN_INSTRUCTION * fmean(call_seconds(1, device))
    memory = rank_memory(world, device, settings) + (process_bytes if settings.memory_limit_bytes else 0.0)
    known = world.gather_objects((memory, overhead), "describing the machine")
    return Cluster(
        hosts=world.hosts,
        memory_bytes=tuple(memory for memory, _ in known),
        speeds=watch.speeds(),
        local_link=local,
        remote_link=remote,
        all_reduce_bytes_per_second=sums.bytes_per_second,
        all_reduce_latency_seconds=sums.latency_seconds,
        overhead_seconds=median_low(each for _, each in known),
        process_bytes=process_bytes,
        fragmentation=_fragmentation(device),
        own_process_bytes=() if settings.memory_limit_bytes else own_process_bytes,
        memory_margin=settings.memory_margin,
    )


def _fragmentation(device: torch.device) -> float:
    """Returns the bytes that the allocator takes for each; 1 if the user has every tensor mapped for itself."""
    if device.type == "cuda":
        return _FRAGMENTATION_OF_CUDA
    tunables = dict(each.partition("=")[::2] for each in os.environ.get("GLIBC_TUNABLES", "").split(":"))
    mapped_from = tunables.get("glibc.malloc.mmap_threshold") or os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    if mapped_from.isdigit() and int(mapped_from) <= _SMALL_BYTES:
        return 1.0
    return _FRAGMENTATION if tunables.get("glibc.malloc.tcache_count") == "0" else _FRAGMENTATION_WITH_CACHE


def optimizer_factor(optimizer: torch.optim.Optimizer | None, settings: Settings) -> float:
    """Returns the bytes of optimizer state for each byte of a trained parameter, by trying the optimizer out.

    Raises:
        PlanError: the optimizer cannot be tried out.
    """
    if settings.optimizer_bytes_factor != "auto":
        return float(settings.optimizer_bytes_factor)
    if optimizer is None:
        return 0.0
    try:
        with untouched_generator(torch.device("cpu")):
            return state_factor(optimizer)
    except Exception as error:
        raise PlanError(
            f"{type(optimizer).__name__} cannot be tried out: got {type(error).__name__} from its step() alone: "
            f"{error}. Pass optimizer_bytes_factor, the bytes of its state for each byte of parameters (2 for Adam in "
            "the parameters' own dtype); and with it, for one of several steps by a closure or methods (SAM), "
            "num_stages=1 and num_replicas=the number of ranks: each then holds all parameters, as such a step wants."
        ) from error


def optimizer_cost(optimizer: torch.optim.Optimizer | None, world: World, device: torch.device) -> OptimizerCost:
    """Measures what a step of the optimizer takes, on all ranks at once; nothing if there is none. Collective.

    An optimizer whose state the user has declared, because it cannot be tried out, counts as taking no time.
    """
    mine = OptimizerCost()
    if optimizer is not None:
        try:
            with untouched_generator(device):
                mine = measure_step(optimizer, device)
        except Exception as error:
            logger.info("the step of %s cannot be tried out, and is left out: %s", type(optimizer).__name__, error)
    known = world.gather_objects(mine, "measuring the optimizer")
    return OptimizerCost(
        median_low(cost.seconds_per_parameter for cost in known),
        median_low(cost.seconds_per_byte for cost in known),
        max(cost.work_of_all for cost in known),
        max(cost.work_of_largest for cost in known),
    )


def keep_freed_memory() -> None:
    """Lets the C library keep what tensors free, where it can: a step asks for the same memory as the one before it.

    Giving it back and getting it again, page by page, takes up to a sixth of a step. Small pieces join their free
    neighbours at once: those that wait to be used again keep tensors out of the holes beside them. What the user has
    set counts.
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
