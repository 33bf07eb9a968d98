"""Notes the line of the user's model that fixes a size which a trace keeps free; torch.export does not say it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autovaruna.graph.explain import in_transform
from autovaruna.graph.exporting.lone_size import noted_branches
from autovaruna.graph.origin import is_users


class TransformError(Exception):
    """Stops a trace in a function transform, whose result would hold for one batch size alone."""


@contextmanager
def noted_sizes() -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Notes lines that fix a size, that tell one sample from several, and that tell many, while the context lasts."""
    with noted_fixed_sizes() as fixing, noted_branches() as (lone, large):
        yield fixing, lone, large


@contextmanager
def noted_fixed_sizes() -> Iterator[list[str]]:
    """Notes ``at file:line (code)`` of each line that fixes a size while the context lasts."""
    places: list[str] = []
    known: Any = getattr(ShapeEnv, "_set_replacement", None)  # private to torch: without it, no line is noted

    def noting(self: ShapeEnv, symbol: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, sympy.Integer):
            stack = traceback.extract_stack()
            if in_transform(stack):
                raise TransformError("it uses a function transform of torch.func, which fixes the size of a batch")
            frames = [frame for frame in stack if is_users(frame.filename)]
            places.extend(f" at {frame.filename}:{frame.lineno} ({frame.line})" for frame in frames[-1:])
        return known(self, symbol, value, *args, **kwargs)

    if known is not None:
        ShapeEnv._set_replacement = noting  # type: ignore[method-assign, assignment]
    try:
        yield places
    finally:
        if known is not None:
            ShapeEnv._set_replacement = known  # type: ignore[method-assign]
