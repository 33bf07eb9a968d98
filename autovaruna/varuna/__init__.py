"""Varuna's own interface over the same rooms: cut points, whole steps, its profiler and its launcher.

What needs torch is imported with its first use, so that the launcher starts without it.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from autovaruna.graph.cuts import CutPoint
    from autovaruna.varuna.profiler import AutoConfig, Profiler
    from autovaruna.varuna.varuna import Varuna

__all__ = ["AutoConfig", "CutPoint", "Profiler", "Varuna"]


def __getattr__(name: str) -> object:
    """Imports a public name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module("autovaruna"), name)
