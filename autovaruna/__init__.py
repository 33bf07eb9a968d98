"""Trains one PyTorch model over many processes, after one added line."""

from __future__ import annotations

from autovaruna.errors import (
    AutoVarunaError,
    CheckpointError,
    ConfigError,
    DeploymentError,
    InputError,
    MeasureError,
    PlanError,
    RankError,
    ScheduleError,
    TraceError,
)
from autovaruna.parallel.ranks import barrier, get_rank, get_world_size
from autovaruna.parallel.wrapper import AutoVaruna

__version__ = "0.1.0"

__all__ = [
    "AutoVaruna",
    "AutoVarunaError",
    "CheckpointError",
    "ConfigError",
    "DeploymentError",
    "InputError",
    "MeasureError",
    "PlanError",
    "RankError",
    "ScheduleError",
    "TraceError",
    "__version__",
    "barrier",
    "get_rank",
    "get_world_size",
]
