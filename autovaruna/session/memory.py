"""Says how much memory this rank may use, and holds."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
from torch import nn

from autovaruna.config.files import system_bytes
from autovaruna.config.settings import Settings
from autovaruna.heap import give_back_freed_memory
from autovaruna.ranks.world import World

_PROCESS_BYTES = 16 << 20
"""What a process holds on the CPU beside tensors, once it has traced a model, where the system does not say."""
_LATER_BYTES = 5 << 20
"""What planning and splitting add to a process that has traced, measured and sent: pages of code, graphs of stages."""
_FRAGMENTATION, _FRAGMENTATION_WITH_CACHE, _FRAGMENTATION_OF_CUDA = 1.35, 1.75, 1.2
"""Bytes that an allocator takes for each byte that micro-batches make and free.

The first two are of the C library's heap, found from the settings of `benchmarks/prediction.py`: with
``GLIBC_TUNABLES=glibc.malloc.tcache_count=0``, and without, where small pieces that the library keeps for itself lie
between holes. That of CUDA's caching allocator was 1.1 for gigabytes of them and up to 2 for a hundred megabytes."""
_SMALL_BYTES = 1 << 16  # tensors of less than this are few bytes beside others


def rank_memory(world: World, device: torch.device, settings: Settings) -> float:
    """Returns the bytes that this rank may use: the setting, or its share of what the device has, less the margin."""
    num_sharing = world.hosts.count(world.hosts[world.rank])
    total = float(settings.memory_limit_bytes)
    if not total and device.type == "cuda":
        num_sharing_gpu = -(-num_sharing // torch.cuda.device_count())
        total = float(torch.cuda.get_device_properties(device).total_memory) / num_sharing_gpu
    return (total or host_memory() / num_sharing) * (1.0 - settings.memory_margin)


def host_memory() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def resident_bytes(device: torch.device) -> float | None:
    """Returns what this process holds where it computes, less what the heap could give back; None: not known."""
    if device.type == "cuda":
        gc.collect()
        return float(torch.cuda.memory_allocated(device))
    give_back_freed_memory()
    return _resident_set()


def _resident_set() -> float | None:
    try:
        return float(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


class HeldMemory:
    """What a process holds of the memory where it computes, less what it held when there was but the model."""

    def __init__(self, device: torch.device, model: nn.Module, resident: float | None = None) -> None:
        own = [*model.parameters(), *model.buffers()]
        self._device = device
        self._before = (_resident_set() if resident is None else resident) or 0.0
        self._before -= sum(each.nbytes for each in own if each.device.type == "cpu")

    def __call__(self) -> float | None:
        """Returns the bytes: on a GPU the peak of the allocator; None if the system does not say."""
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device))
        now = _resident_set()
        return None if now is None else max(now - self._before, 0.0)


def process_bytes_of(
    world: World, device: torch.device, resident_before: float | None, batch_bytes: float
) -> tuple[float, ...]:
    """Returns what each rank holds beside its stages: its mini-batch, code and graphs, workspaces. Collective."""
    now = resident_bytes(device)
    growth = None if now is None or resident_before is None else max(now - resident_before, 0.0)
    mine = batch_bytes
    if device.type == "cuda":
        mine += growth or 0.0
    else:
        shared = system_bytes("/proc/self/status", "RssShmem") or 0.0
        # samples go to other ranks through shared memory, of which the timing of links has touched pages
        on_its_way = max(batch_bytes - shared, 0.0) if world.num_ranks > 1 else 0.0
        mine += (_PROCESS_BYTES if growth is None else growth) + on_its_way + _LATER_BYTES
    return tuple(number for (number,) in world.gather_numbers((mine,), "measuring what processes hold"))


def fragmentation(device: torch.device) -> float:
    """Returns the bytes that the allocator takes for each; 1 if the user has every tensor mapped for itself."""
    if device.type == "cuda":
        return _FRAGMENTATION_OF_CUDA
    tunables = dict(each.partition("=")[::2] for each in os.environ.get("GLIBC_TUNABLES", "").split(":"))
    mapped_from = tunables.get("glibc.malloc.mmap_threshold") or os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    if mapped_from.isdigit() and int(mapped_from) <= _SMALL_BYTES:
        return 1.0
    return _FRAGMENTATION if tunables.get("glibc.malloc.tcache_count") == "0" else _FRAGMENTATION_WITH_CACHE
