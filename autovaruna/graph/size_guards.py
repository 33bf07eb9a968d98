"""Decides by trying what torch cannot prove of a batch size: a condition that holds for every size fixes none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import get_ident
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_SIZES = (*range(1, 513), *(2**power + step for power in range(10, 32) for step in (-1, 0, 1)))


@contextmanager
def tried_guards() -> Iterator[None]:
    """Takes conditions that hold for every batch size out of those on which a trace stands, while the context lasts.

    A model may compare sizes that are equal in a way that torch's solver does not see: ``min(64, 768 * batch)`` is 64.
    """
    tracing, produce = get_ident(), ShapeEnv.produce_guards

    def producing(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        if get_ident() == tracing and kwargs.get("guards") is None:
            kwargs["guards"] = [each for each in self.guards if not _holds_for_all(self.simplify(each.expr))]
        return produce(self, *args, **kwargs)

    ShapeEnv.produce_guards = producing  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShapeEnv.produce_guards = produce  # type: ignore[method-assign]


@lru_cache(maxsize=4096)
def _holds_for_all(condition: sympy.Basic) -> bool:
    """Whether a condition on one size holds for all that are tried: the small ones, and those around powers of two."""
    symbols = condition.free_symbols
    return len(symbols) == 1 and all(condition.xreplace(dict.fromkeys(symbols, size)) == sympy.true for size in _SIZES)
