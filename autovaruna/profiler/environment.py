"""Describes what a measured time depends on besides the operations, so that times of other machines are not used."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from autovaruna.conf_files import conf_dir
from autovaruna.profiler.cache import ProfileCache
from autovaruna.profiler.profile import device_name
from autovaruna.settings import Settings

_CPU_INFO = Path("/proc/cpuinfo")
_METHOD = ("allocations", "code", "measure", "memory", "parts", "samples", "timing", "work")


def environment(device: torch.device, num_sharing: int = 1, *, splits: bool = True) -> dict[str, Any]:
    """Returns what measured costs are valid for.

    Args:
        device: Where is measured.
        num_sharing: Ranks on this host, which measure at the same time and share its memory bandwidth.
        splits: Whether weight gradients are measured apart, too.
    """
    found: dict[str, Any] = {
        "device": device_name(device),
        "ranks_on_host": num_sharing,
        "torch": torch.__version__,
        "method": _method(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "splits": splits,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return found | (_of_cuda() if device.type == "cuda" else _of_cpu())


def _of_cpu() -> dict[str, Any]:
    return {"processor": _processor(), "capability": torch.backends.cpu.get_cpu_capability()}


def _of_cuda() -> dict[str, Any]:
    kernels: Any = torch.backends.cuda
    return {
        "cuda": torch.version.cuda,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "attention": [
            kernels.flash_sdp_enabled(),
            kernels.mem_efficient_sdp_enabled(),
            kernels.cudnn_sdp_enabled(),
            kernels.math_sdp_enabled(),
        ],
    }


@lru_cache(maxsize=1)
def _processor() -> str:
    """Returns the processor's name."""
    try:
        lines = _CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return next(named, platform.processor() or platform.machine())


@lru_cache(maxsize=1)
def _method() -> str:
    """Returns a digest of how is measured: the source of the files that do."""
    sources = [Path(__file__).with_name(f"{name}.py") for name in _METHOD]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def cache_of(
    settings: Settings, device: torch.device, num_sharing: int = 1, *, splits: bool = True
) -> ProfileCache | None:
    """Returns where measured costs are kept, if the settings want that; arguments as in `environment`."""
    if settings.profile_cache is False:
        return None
    is_own = settings.profile_cache not in (True, "auto")
    directory = str(settings.profile_cache) if is_own else conf_dir(os.environ) / "profiles"
    return ProfileCache(directory, environment(device, num_sharing, splits=splits), settings.profile_iterations)
