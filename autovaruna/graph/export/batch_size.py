"""Watches what a trace goes by in sizes: lines that fix the batch size or tell one sample from several, and conditions
that hold for all sizes, or up to some size.
"""

from __future__ import annotations

import sys
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from threading import get_ident
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autovaruna._torch import ValueRanges, int_oo, replaced
from autovaruna.graph.export.errors import BatchSizeError, in_transform, is_users, running_modules, users_line


class FreeLengths:
    """The lengths beside that of the batch that a trace leaves free, and the conditions on them that it goes by."""

    def __init__(self) -> None:
        self._noted: list[Any] = []
        self.conditions: dict[sympy.Basic, None] = {}

    def note(self, lengths: Sequence[Any]) -> None:
        """Notes them as the trace starts."""
        self._noted = [each.node for each in lengths if isinstance(each, torch.SymInt)]

    def symbols(self) -> set[Any]:
        """Returns their symbols, as far as the trace has learned by now."""
        return {symbol for node in self._noted for each in (node.expr, node._expr) for symbol in each.free_symbols}

    def take(self, shapes: ShapeEnv, conditions: Iterable[sympy.Basic]) -> None:
        """Takes conditions on them, and the bounds of those that there are."""
        self.conditions |= dict.fromkeys(conditions)
        for symbol in sorted(self.symbols(), key=str):
            bounds = shapes.var_to_range[symbol]
            length = shapes.replace(symbol)
            self.conditions[sympy.Ge(length, bounds.lower)] = None
            if bounds.upper != int_oo:
                self.conditions[sympy.Le(length, bounds.upper)] = None


_NUMBERS = (
    (torch.SymInt, "__int__"),
    (torch.SymInt, "__index__"),
    (torch.SymFloat, "__int__"),
    (torch.SymFloat, "__float__"),
)


@contextmanager
def refused_numbers(free: FreeLengths) -> Iterator[None]:
    """Stops a trace, on this thread, at the user's line that makes a number of Python of the batch size.

    torch would stop later, where the number meets the batch: maybe in another module, which is not to be kept whole.
    """
    tracing = get_ident()

    def refusing(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def made(self: Any) -> Any:
            if get_ident() == tracing and _is_of_batch(self, free) and _is_users_line():
                raise BatchSizeError(
                    f"forward fixes its batch size{users_line()}, where it makes a number of Python of it. Write "
                    "x.shape[0] as it is, without int(), float(), range() or math, and // for a quotient that is "
                    "whole; or move the line into a submodule, which is then kept whole."
                )
            return make(self)

        return made

    with ExitStack() as stack:
        for kind, name in _NUMBERS:
            stack.enter_context(replaced(kind, name, refusing(getattr(kind, name))))
        yield


def _is_of_batch(number: Any, free: FreeLengths) -> bool:
    """Whether a number depends on the batch size."""
    symbols = number.node.expr.free_symbols & number.node.shape_env.backed_var_to_val.keys()
    return bool(symbols - free.symbols())


@contextmanager
def noted_branches(free: FreeLengths) -> Iterator[list[str]]:
    """Notes ``at file:line (code)`` of the user's branches, on this thread, that one sample would not take.

    torch takes it for granted that a size that is kept free is at least two, and says nothing of it.
    """
    tracing, lone = get_ident(), list[str]()
    known: Any = torch.SymBool.__bool__

    def noting(self: torch.SymBool) -> bool:
        answer: bool = known(self)
        if free.symbols() & self.node.expr.free_symbols:
            return answer
        if get_ident() == tracing and _differs_for_one(self, answer) and _is_users_line():
            lone.append(users_line())
        return answer

    with replaced(torch.SymBool, "__bool__", noting):
        yield lone


def _is_users_line() -> bool:
    frame = sys._getframe(2)
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


class TransformError(Exception):
    """Stops a trace in a function transform, whose result would hold for one batch size alone."""


@dataclass(frozen=True)
class FixedSize:
    """A size was fixed while a trace ran.

    Attributes:
        line: ``at file:line (code)`` of the user's line.
        running: the modules that ran then, the innermost first.
    """

    line: str
    running: tuple[nn.Module, ...]


@contextmanager
def noted_fixed_sizes() -> Iterator[list[FixedSize]]:
    """Notes where each size is fixed while the context lasts."""
    places: list[FixedSize] = []
    known: Any = getattr(ShapeEnv, "_set_replacement", None)  # private to torch: without it, no line is noted

    def noting(self: ShapeEnv, symbol: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, sympy.Integer):
            stack = traceback.extract_stack()
            if in_transform(stack):
                raise TransformError("it uses a function transform of torch.func, which fixes the size of a batch")
            if line := users_line():
                places.append(FixedSize(line, running_modules()))
        return known(self, symbol, value, *args, **kwargs)

    with replaced(ShapeEnv, "_set_replacement", noting):
        yield places


_SIZES = (*range(1, 513), *(2**power + step for power in range(10, 25) for step in (-1, 0, 1)))
"""Sizes for which conditions are tried; above the last one there is no batch."""


@contextmanager
def tried_guards(free: FreeLengths) -> Iterator[list[tuple[int, str]]]:
    """Takes conditions that hold for every batch size out of those on which a trace stands, while the context lasts.

    A model may compare sizes that are equal in a way that torch's solver does not see: ``min(64, 768 * batch)`` is 64.
    Conditions that hold up to some size, and for none above it, are taken out, too; those sizes are yielded, each with
    the user's line where that is known. Conditions on other lengths go to `free`.
    """
    tracing, produce = get_ident(), ShapeEnv.produce_guards
    relate: Any = getattr(ShapeEnv, "_maybe_guard_rel", None)  # private to torch: without it, no line is known
    lines: dict[Any, str] = {}
    greatest: list[tuple[int, str]] = []

    def producing(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        if get_ident() == tracing and kwargs.get("guards") is None:
            kwargs["guards"] = _fixing(self, greatest, free, lines)
        return produce(self, *args, **kwargs)

    def relating(self: ShapeEnv, condition: Any, *args: Any) -> None:
        if get_ident() == tracing:
            lines.setdefault(condition, users_line())
        relate(self, condition, *args)

    with (
        replaced(ShapeEnv, "produce_guards", producing),
        replaced(ShapeEnv, "_maybe_guard_rel", relating),
    ):
        yield greatest


def _fixing(
    shapes: ShapeEnv, greatest: list[tuple[int, str]], free: FreeLengths, lines: Mapping[Any, str]
) -> list[Any]:
    """Returns the conditions that hold neither for all sizes nor up to one; torch gets those on several sizes."""
    known, lengths = dict(shapes.var_to_range), free.symbols()
    conditions = [(each, shapes.simplify(each.expr)) for each in shapes.guards]
    bounds = _open_ranges(shapes, lengths)
    free.take(shapes, (condition for _, condition in conditions if condition.free_symbols & lengths))
    conditions = [(each, condition) for each, condition in conditions if not condition.free_symbols & lengths]
    others = [each for each, condition in conditions if len(condition.free_symbols) != 1]
    ours = ((each, condition) for each, condition in conditions if len(condition.free_symbols) == 1)
    bounded = [(each, size) for each, condition in ours if (size := _holds_up_to(condition)) < _SIZES[-1]]
    bounds += [(size, lines.get(each.expr, "")) for each, size in bounded]
    if any(size == 0 for size, _ in bounds):  # torch says what they are
        shapes.var_to_range.update(known)
        return others + [each for each, _ in bounded]
    greatest += bounds
    return others


def _open_ranges(shapes: ShapeEnv, lengths: set[Any]) -> list[tuple[int, str]]:
    """Takes bounds out of what a trace has learned of sizes, unless they leave out small ones; returns upper ones."""
    bounds: list[tuple[int, str]] = []
    for symbol, known in list(shapes.var_to_range.items()):
        is_of_batch = symbol in shapes.backed_var_to_val and symbol not in lengths
        if is_of_batch and known.is_int and known.lower <= 2:
            if known.upper != int_oo and known.upper < _SIZES[-1]:
                bounds.append((int(known.upper), ""))
            shapes.var_to_range[symbol] = ValueRanges(min(known.lower, 2), int_oo)
    return bounds


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
