"""Varuna's own interface over the same rooms: cut points, whole steps, its profiler and its launcher."""

from autovaruna.graph.cutpoint import CutPoint
from autovaruna.varuna.varuna import Varuna

__all__ = ["CutPoint", "Varuna"]
