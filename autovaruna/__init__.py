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

__version__ = "0.1.0"

__all__ = [
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
]
