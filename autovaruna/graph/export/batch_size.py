"""Records on which sizes a trace depends: lines that fix the batch size or treat one sample in another way, conditions.

A condition may hold for all sizes, or up to some size.
"""

from __future__ import annotations

import sys
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autovaruna._torch import COMPARES_SIZES, FIXES_SIZE, ValueRanges, int_oo, replaced_here
from autovaruna.graph.export.errors import BatchSizeError, in_transform
from autovaruna.graph.source_lines import is_users, running_modules, users_line

_FEW = range(2, 65)
_SIZES = (*range(1, 513), *(2**power + step for power in range(10, 25) for step in (-1, 0, 1)))
"""Sizes for which conditions are tried; above the last one there is no batch."""


class TransformError(Exception):
    """Stops a trace in a function transform, whose result would hold for one batch size alone."""


class SizeWatch:
    """Records on which sizes a trace on this thread depends; stops it where the batch size becomes a number of Python.

    Attributes:
        fixed_at: ``at file:line (code)`` of the user's line that fixed a size first; empty: there is none.
        fixed_in: the modules that ran then, the innermost first.
        asks_for_one: the same of the user's first branch that one sample would not take; torch takes it for granted
            that a size that is kept free is at least two, and says nothing of it.
        greatest: sizes up to which alone a condition holds, each with the user's line where that is known.
        conditions: those on free lengths.
    """

    def __init__(self) -> None:
        self.fixed_at = ""
        self.fixed_in: tuple[nn.Module, ...] = ()
        self.asks_for_one = ""
        self.greatest: list[tuple[int, str]] = []
        self.conditions: dict[sympy.Basic, None] = {}
        self._lengths: list[Any] = []
        self._lines: dict[Any, str] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Records while the context lasts; a private name that a version of torch has not is left out."""
        with ExitStack() as stack:
            for kind, name, act in (
                (torch.SymInt, "__int__", self._make_number),
                (torch.SymInt, "__index__", self._make_number),
                (torch.SymFloat, "__int__", self._make_number),
                (torch.SymFloat, "__float__", self._make_number),
                (torch.SymBool, "__bool__", self._branch),
                (ShapeEnv, FIXES_SIZE, self._fix),
                (ShapeEnv, COMPARES_SIZES, self._relate),
                (ShapeEnv, "produce_guards", self._produce),
            ):
                stack.enter_context(replaced_here(kind, name, act))
            yield

    def places(self) -> tuple[str, str]:
        """Returns the line that fixed a size first, and the first one that a batch of some size would not pass."""
        lines = (line for condition, line in self._lines.items() if line and _fails_for_some(condition))
        return self.fixed_at, next(lines, "")

    def record_free_lengths(self, lengths: Sequence[Any]) -> None:
        self._lengths = [each.node for each in lengths if isinstance(each, torch.SymInt)]

    def _free(self) -> set[Any]:
        """Returns the symbols of free lengths, as far as the trace has learned by now."""
        return {symbol for node in self._lengths for each in (node.expr, node._expr) for symbol in each.free_symbols}

    def _make_number(self, plain: Any, number: Any) -> Any:
        """Stops at the user's line; torch would stop where the number meets the batch, in another module maybe."""
        symbols = number.node.expr.free_symbols & number.node.shape_env.backed_var_to_val.keys()
        if symbols - self._free() and _is_users_line():
            raise BatchSizeError(
                f"forward fixes its batch size{users_line()}, where it makes a number of Python of it. Write "
                "x.shape[0] as it is, without int(), float(), range() or math, and // for a quotient that is "
                "whole; or move the line into a submodule, which is then kept whole."
            )
        return plain(number)

    def _branch(self, plain: Any, condition: torch.SymBool) -> bool:
        answer: bool = plain(condition)
        is_free = self._free() & condition.node.expr.free_symbols
        if not is_free and _differs_for_one(condition, answer) and _is_users_line():
            self.asks_for_one = self.asks_for_one or users_line()
        return answer

    def _fix(
        self, plain: Callable[..., Any], shapes: ShapeEnv, symbol: Any, value: Any, *args: Any, **more: Any
    ) -> Any:
        if isinstance(value, sympy.Integer):
            if in_transform(traceback.extract_stack()):
                raise TransformError("it uses a function transform of torch.func, which fixes the size of a batch")
            if not self.fixed_at and (line := users_line()):
                self.fixed_at, self.fixed_in = line, running_modules()
        return plain(shapes, symbol, value, *args, **more)

    def _relate(self, plain: Any, shapes: ShapeEnv, condition: Any, *args: Any) -> None:
        self._lines.setdefault(condition, users_line())
        plain(shapes, condition, *args)

    def _produce(self, plain: Any, shapes: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        """Takes conditions that hold for every batch size out of those on which the trace stands.

        A model may compare sizes that are equal in a way that torch's solver does not see: ``min(64, 768 * batch)`` is
        64. Conditions that hold up to some size, and for none above it, are taken out, too.
        """
        if kwargs.get("guards") is None:
            kwargs["guards"] = self._fixing(shapes)
        return plain(shapes, *args, **kwargs)

    def _fixing(self, shapes: ShapeEnv) -> list[Any]:
        """Returns the conditions that hold neither for all sizes nor up to one; torch gets those on several sizes."""
        known, lengths = dict(shapes.var_to_range), self._free()
        conditions = [(each, shapes.simplify(each.expr)) for each in shapes.guards]
        bounds = _open_ranges(shapes, lengths)
        self._record_conditions(shapes, (condition for _, condition in conditions if condition.free_symbols & lengths))
        conditions = [(each, condition) for each, condition in conditions if not condition.free_symbols & lengths]
        others = [each for each, condition in conditions if len(condition.free_symbols) != 1]
        ours = ((each, condition) for each, condition in conditions if len(condition.free_symbols) == 1)
        bounded = [(each, size) for each, condition in ours if (size := _holds_up_to(condition)) < _SIZES[-1]]
        bounds += [(size, self._lines.get(each.expr, "")) for each, size in bounded]
        if any(size == 0 for size, _ in bounds):  # torch says what they are
            shapes.var_to_range.update(known)
            return others + [each for each, _ in bounded]
        self.greatest += bounds
        return others

    def _record_conditions(self, shapes: ShapeEnv, conditions: Iterable[sympy.Basic]) -> None:
        """Records conditions on free lengths, and the bounds of these."""
        self.conditions |= dict.fromkeys(conditions)
        for symbol in sorted(self._free(), key=str):
            bounds = shapes.var_to_range[symbol]
            length = shapes.replace(symbol)
            self.conditions[sympy.Ge(length, bounds.lower)] = None
            if bounds.upper != int_oo:
                self.conditions[sympy.Le(length, bounds.upper)] = None


def _is_users_line() -> bool:
    """Whether a user's line calls the method of a size that calls this."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_code.co_filename == torch.__file__:  # ``if x.shape[0] - 1:``
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


def _differs_for_one(condition: torch.SymBool, answer: bool) -> bool:
    """Whether a condition on one size that an input has is otherwise for one sample."""
    expression = condition.node.expr
    symbols = expression.free_symbols
    if len(symbols) != 1 or not symbols <= condition.node.shape_env.backed_var_to_val.keys():
        return False
    found = expression.xreplace(dict.fromkeys(symbols, sympy.Integer(1)))
    return found in (sympy.true, sympy.false) and bool(found) != answer


def _open_ranges(shapes: ShapeEnv, lengths: set[Any]) -> list[tuple[int, str]]:
    """Removes bounds of batch sizes that a trace has learned, unless they exclude small ones; returns upper ones."""
    bounds: list[tuple[int, str]] = []
    for symbol, known in list(shapes.var_to_range.items()):
        is_of_batch = symbol in shapes.backed_var_to_val and symbol not in lengths
        if is_of_batch and known.is_int and known.lower <= 2:
            if known.upper != int_oo and known.upper < _SIZES[-1]:
                bounds.append((int(known.upper), ""))
            shapes.var_to_range[symbol] = ValueRanges(min(known.lower, 2), int_oo)
    return bounds


def _fails_for_some(condition: sympy.Basic) -> bool:
    symbols = condition.free_symbols
    return len(symbols) == 1 and any(condition.xreplace(dict.fromkeys(symbols, size)) == sympy.false for size in _FEW)


@lru_cache(maxsize=4096)
def _holds_up_to(condition: sympy.Basic) -> int:
    """Returns the greatest size up to which a condition on one size holds; 0: there is none, or it holds above, too."""

    def fails(size: int) -> bool:
        return bool(condition.xreplace(dict.fromkeys(condition.free_symbols, size)) != sympy.true)

    failing = [fails(size) for size in _SIZES]
    held = failing.index(True) if True in failing else len(failing)
    if not held or not all(failing[held:]):
        return 0
    between = range(_SIZES[held - 1], _SIZES[min(held, len(failing) - 1)])
    return between[0] + bisect_left(between, True, key=fails) - 1 if between else _SIZES[-1]
