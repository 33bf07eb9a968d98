"""Defines every error that this library raises on purpose, in one tree.

    AutoVarunaError
    ├── ConfigError (also ValueError)    a setting: in a conf file, the environment or a keyword
    ├── TraceError                       the model cannot be traced
    ├── MeasureError                     a measurement failed
    ├── PlanError                        there is no plan: infeasible, or bad forced cuts
    ├── ScheduleError                    a schedule breaks a rule
    ├── DeploymentError                  a deployment file is stale or damaged
    ├── RankError (also RuntimeError)    ranks disagree, or one of them failed
    ├── InputError (also ValueError)     a batch that cannot be used
    ├── OrderError (also RuntimeError)   a call that comes at the wrong time
    └── CheckpointError                  a checkpoint is damaged or does not fit

A message says what was got, what was expected and what to do.
"""

from __future__ import annotations

SUPPORTED_TORCH = "torch>=2.11,<2.15"
"""The versions of torch that the tests pass on, which errors about torch name; setup.py asks for them."""


class AutoVarunaError(Exception):
    """Is the base of every error that a user can cause."""

    is_second_hand = False  # whether it only passes on what went wrong on another rank


class ConfigError(AutoVarunaError, ValueError):
    """Says that a setting is unknown, of a wrong type, or given twice; names the file or variable and the key."""


class TraceError(AutoVarunaError):
    """Says that the model cannot be traced, with the line of the user's file."""

    own: Exception | None = None  # what forward raises by itself, on whichever process


class MeasureError(AutoVarunaError):
    """Says that a measurement failed; a failed one is never filled in."""


class PlanError(AutoVarunaError):
    """Says that no plan exists: the model does not fit, or forced cuts contradict each other."""


class ScheduleError(AutoVarunaError):
    """Says which numbered rule a schedule breaks, and where."""


class DeploymentError(AutoVarunaError):
    """Says that a deployment file is damaged, or what changed since it was saved."""


class RankError(AutoVarunaError, RuntimeError):
    """Says that ranks disagree (calls, shapes, settings) or that a rank failed."""


class InputError(AutoVarunaError, ValueError):
    """Says why a batch cannot be used."""


class OrderError(AutoVarunaError, RuntimeError):
    """Says that a call comes at the wrong time: a second backward, a move of a model that is split."""


class CheckpointError(AutoVarunaError):
    """Says that a checkpoint is damaged or does not fit the model."""
