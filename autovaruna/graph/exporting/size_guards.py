"""Decides by trying what torch cannot prove of a batch size: a condition that holds for every size fixes none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import get_ident
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autovaruna._torch import ValueRanges, int_oo

_SIZES = (*range(1, 513), *(2**power + step for power in range(10, 32) for step in (-1, 0, 1)))


@contextmanager
def tried_guards(least: int) -> Iterator[list[int]]:
    """Takes conditions that hold for every batch size out of those on which a trace stands, while the context lasts.

    A model may compare sizes that are equal in a way that torch's solver does not see: ``min(64, 768 * batch)`` is 64.
    Conditions that hold up to some size, and for none above it, are taken out as well, and that size is noted: what
    larger batches would need is for `thresholds` to find out.

    Args:
        least: The smallest batch size that is asked for.
    """
    tracing, produce = get_ident(), ShapeEnv.produce_guards
    greatest: list[int] = []

    def producing(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        if get_ident() == tracing and kwargs.get("guards") is None:
            kwargs["guards"] = _fixing(self, least, greatest)
        return produce(self, *args, **kwargs)

    ShapeEnv.produce_guards = producing  # type: ignore[method-assign]
    try:
        yield greatest
    finally:
        ShapeEnv.produce_guards = produce  # type: ignore[method-assign]


def _fixing(shapes: ShapeEnv, least: int, greatest: list[int]) -> list[Any]:
    """Returns the conditions that hold neither for all sizes nor, if that goes for all of them, up to one of them.

    Those on several sizes are left to torch, which knows that they are equal.
    """
    known = dict(shapes.var_to_range)
    bounds = _open_ranges(shapes, least)
    conditions = [(each, shapes.simplify(each.expr)) for each in shapes.guards]
    others = [each for each, condition in conditions if len(condition.free_symbols) != 1]
    ours = ((each, condition) for each, condition in conditions if len(condition.free_symbols) == 1)
    reached = [(each, _holds_up_to(condition, least)) for each, condition in ours]
    bounds += [size for _, size in reached if size < _SIZES[-1]]
    if 0 in bounds:
        shapes.var_to_range.update(known)
        return others + [each for each, size in reached if size < _SIZES[-1]]
    greatest += bounds
    return others


def _open_ranges(shapes: ShapeEnv, least: int) -> list[int]:
    """Takes bounds out of what a trace has learned of sizes, unless they leave out small ones; returns upper ones."""
    bounds = []
    for symbol, known in list(shapes.var_to_range.items()):
        if symbol in shapes.backed_var_to_val and known.is_int and known.lower <= max(2, least):
            bounds += [] if known.upper == int_oo else [int(known.upper)]
            shapes.var_to_range[symbol] = ValueRanges(min(known.lower, 2), int_oo)
    return bounds


@lru_cache(maxsize=4096)
def _holds_up_to(condition: sympy.Basic, least: int) -> int:
    """Returns the greatest size up to which a condition on one size holds, from `least` on; 0: there is no such size.

    Tried are the small ones, and those around powers of two.
    """
    symbols, sizes = condition.free_symbols, [size for size in _SIZES if size >= least]
    held = 0
    for size in sizes:
        if condition.xreplace(dict.fromkeys(symbols, size)) != sympy.true:
            break
        held = size
    above = [size for size in sizes if size > held]
    return 0 if held and any(condition.xreplace(dict.fromkeys(symbols, size)) == sympy.true for size in above) else held
