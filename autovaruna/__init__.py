"""Trains one PyTorch model over many processes, after one added line.

What needs torch is imported with its first use, so that plans can be made and shown without it.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

from autovaruna.errors import SUPPORTED_TORCH as _SUPPORTED_TORCH
from autovaruna.errors import (
    AutoVarunaError,
    CheckpointError,
    ConfigError,
    DeploymentError,
    InputError,
    MeasureError,
    OrderError,
    PlanError,
    RankError,
    ScheduleError,
    TraceError,
)

if _TYPE_CHECKING:
    from autovaruna.api import AutoVaruna
    from autovaruna.checkpoint.load import CheckpointInfo, load_checkpoint
    from autovaruna.elastic.notices import notify_manager_preempt
    from autovaruna.elastic.sampler import ElasticSampler
    from autovaruna.graph.cuts import CutPoint
    from autovaruna.graph.opaque.keep import keep_whole
    from autovaruna.integrations.process_group import init_process_group
    from autovaruna.ranks.environment import barrier, get_rank, get_world_size
    from autovaruna.varuna.profiler import AutoConfig, Profiler
    from autovaruna.varuna.varuna import Varuna

__version__ = "0.2.0"

__all__ = [
    "AutoConfig",
    "AutoVaruna",
    "AutoVarunaError",
    "CheckpointError",
    "CheckpointInfo",
    "ConfigError",
    "CutPoint",
    "DeploymentError",
    "ElasticSampler",
    "InputError",
    "MeasureError",
    "OrderError",
    "PlanError",
    "Profiler",
    "RankError",
    "ScheduleError",
    "TraceError",
    "Varuna",
    "__version__",
    "barrier",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "keep_whole",
    "load_checkpoint",
    "notify_manager_preempt",
]

_HOMES = {
    "AutoConfig": "autovaruna.varuna.profiler",
    "AutoVaruna": "autovaruna.api",
    "CheckpointInfo": "autovaruna.checkpoint.load",
    "CutPoint": "autovaruna.graph.cuts",
    "ElasticSampler": "autovaruna.elastic.sampler",
    "Profiler": "autovaruna.varuna.profiler",
    "Varuna": "autovaruna.varuna.varuna",
    "barrier": "autovaruna.ranks.environment",
    "get_rank": "autovaruna.ranks.environment",
    "get_world_size": "autovaruna.ranks.environment",
    "init_process_group": "autovaruna.integrations.process_group",
    "keep_whole": "autovaruna.graph.opaque.keep",
    "load_checkpoint": "autovaruna.checkpoint.load",
    "notify_manager_preempt": "autovaruna.elastic.notices",
}


def __getattr__(name: str) -> object:
    """Imports a public name that needs torch.

    Raises:
        ImportError: torch lacks something that the name needs; says which torch it is.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(_import_module(_HOMES[name]), name)
    except (AttributeError, ImportError) as error:
        if isinstance(error, ImportError) and not (error.name or "").startswith("torch."):
            raise
        raise ImportError(
            f"autovaruna.{name} cannot be imported: got {type(error).__name__}: {error}, with torch "
            f"{_version('torch')}. Expected {_SUPPORTED_TORCH}."
        ) from error
