"""Watches what a trace goes by in sizes: lines that fix the batch size or tell one sample from several, and conditions
that hold for all sizes, or up to some size.

Arithmetic on sizes is cached: a deep model asks for the same few sums and products thousands of times. Making one fake
tensor takes some twenty of them, each of which goes through sympy. What comes out depends on the two expressions alone,
as long as torch learns nothing that replaces a symbol.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import get_ident
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autovaruna._torch import ValueRanges, int_oo, is_recording, trace_log
from autovaruna.errors import TraceError
from autovaruna.graph.export.errors import in_transform
from autovaruna.graph.source_lines import is_users, users_line

_OPERATIONS = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min", "sym_and", "sym_or")
_OTHERS = ("maybe_as_int", "wrap_int")
_OF_SYMBOLS = {"_replacements_version_counter", "_translation_validation_enabled"}


@contextmanager
def cached_size_arithmetic() -> Iterator[None]:
    """Recalls arithmetic on sizes, on this thread, while the context lasts, if this torch has what that takes."""
    if not _is_supported():
        yield
        return
    arithmetic = _Arithmetic()
    own: Any = SymNode
    before = {name: getattr(own, name) for name in (*_OPERATIONS, *_OTHERS)}
    for name in _OPERATIONS:
        setattr(own, name, arithmetic.operation(name, before[name]))
    own.maybe_as_int, own.wrap_int = arithmetic.as_int(own.maybe_as_int), arithmetic.wrap(own.wrap_int)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(own, name, method)


class _Arithmetic:
    """What was learned of sizes; a later replacement of a symbol makes it forget."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._of: tuple[Any, int] = (None, -1)
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def operation(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what runs an operation on two sizes once, and then makes its result anew."""

        def recall(size: Any, other: Any) -> Any:
            if not self._is_fit(size) or type(other) is not SymNode or is_recording():
                return run(size, other)
            one, two = size._expr, other._expr
            key = (
                name,
                id(one),
                id(two),
                size._hint,
                other._hint,
                size.pytype,
                other.pytype,
                size._optimized_summation,
                other._optimized_summation,
            )
            known = self._known.get(key)
            if known is None:
                result = run(size, other)
                self._known[key] = one, two, dict(vars(result))
                return result
            return _made(known[2])

        return recall

    def as_int(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what asks once for each expression whether it is a number."""

        def recall(size: Any) -> Any:
            if not self._is_fit(size):
                return run(size)
            key = "maybe_as_int", id(size._expr)
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = size._expr, run(size)
            return known[1]

        return recall

    def wrap(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what makes a size of a number."""

        def recall(size: Any, number: int) -> Any:
            if not self._is_fit(size) or type(number) is not int:
                return run(size, number)
            key = "wrap_int", number
            known = self._known.get(key)
            if known is None:
                result = run(size, number)
                self._known[key] = (dict(vars(result)),)
                return result
            return _made(known[0])

        return recall

    def _is_fit(self, size: Any) -> bool:
        """Whether what is known holds for a size; what was known of other symbols is forgotten."""
        if get_ident() != self._thread:
            return False
        symbols = size.shape_env
        if symbols is None or symbols._translation_validation_enabled:
            return False
        now = symbols, symbols._replacements_version_counter
        if now != self._of:
            self._of = now
            self._known.clear()
        return True


def _made(state: dict[str, Any]) -> Any:
    made = SymNode.__new__(SymNode)
    made.__dict__ = state.copy()
    return made


def _is_supported() -> bool:
    """Whether this version of torch has the private parts that recalling takes, and logs no arithmetic."""
    has_methods = all(hasattr(SymNode, name) for name in (*_OPERATIONS, *_OTHERS))
    return has_methods and vars(ShapeEnv()).keys() >= _OF_SYMBOLS and not trace_log.GET_DTRACE_STRUCTURED


_MANY = sympy.Integer(2**24)


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


@contextmanager
def noted_branches(free: FreeLengths) -> Iterator[tuple[list[str], list[str]]]:
    """Notes ``at file:line (code)`` of branches, on this thread, that one sample, or very many, would not take.

    torch takes it for granted that a size that is kept free is at least two, and says nothing of it.

    Args:
        free: Lengths that are no batch sizes.

    Yields:
        The branches on one sample in the user's own lines, and the lines that came to a branch on many.
    """
    tracing, lone, large = get_ident(), list[str](), list[str]()
    known: Any = torch.SymBool.__bool__

    def noting(self: torch.SymBool) -> bool:
        answer: bool = known(self)
        if free.symbols() & self.node.expr.free_symbols:
            return answer
        if get_ident() == tracing and _differs_for(sympy.Integer(1), self, answer) and _is_users_branch():
            lone.append(users_line())
        elif get_ident() == tracing and _differs_for(_MANY, self, answer):
            large.append(users_line())
        return answer

    torch.SymBool.__bool__ = noting  # type: ignore[method-assign]
    try:
        yield lone, large
    finally:
        torch.SymBool.__bool__ = known  # type: ignore[method-assign]


def _is_users_branch() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == torch.__file__:  # ``if x.shape[0] - 1:``
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


def _differs_for(size: sympy.Integer, condition: torch.SymBool, answer: bool) -> bool:
    """Whether a condition on one size that an input has is otherwise where that is `size`."""
    expression = condition.node.expr
    symbols = expression.free_symbols
    if len(symbols) != 1 or not symbols <= condition.node.shape_env.backed_var_to_val.keys():
        return False
    found = expression.xreplace(dict.fromkeys(symbols, size))
    return found in (sympy.true, sympy.false) and bool(found) != answer


class TransformError(Exception):
    """Stops a trace in a function transform, whose result would hold for one batch size alone."""


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


_SIZES = (*range(1, 513), *(2**power + step for power in range(10, 32) for step in (-1, 0, 1)))


@contextmanager
def tried_guards(least: int, free: FreeLengths) -> Iterator[list[tuple[int, str]]]:
    """Takes conditions that hold for every batch size out of those on which a trace stands, while the context lasts.

    A model may compare sizes that are equal in a way that torch's solver does not see: ``min(64, 768 * batch)`` is 64.
    Conditions that hold up to some size, and for none above it, are taken out as well, and that size is noted: what
    larger batches would need is for `thresholds` to find out.

    Args:
        least: The smallest batch size that is asked for.
        free: Other lengths, which get the conditions on them.

    Yields:
        Such sizes, each with the user's line where that is known.
    """
    tracing, produce = get_ident(), ShapeEnv.produce_guards
    relate: Any = getattr(ShapeEnv, "_maybe_guard_rel", None)  # private to torch: without it, no line is known
    lines: dict[Any, str] = {}
    greatest: list[tuple[int, str]] = []

    def producing(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        if get_ident() == tracing and kwargs.get("guards") is None:
            kwargs["guards"] = _fixing(self, least, greatest, free, lines)
        return produce(self, *args, **kwargs)

    def relating(self: ShapeEnv, condition: Any, *args: Any) -> None:
        if get_ident() == tracing:
            lines.setdefault(condition, users_line())
        relate(self, condition, *args)

    ShapeEnv.produce_guards = producing  # type: ignore[method-assign]
    if relate is not None:
        ShapeEnv._maybe_guard_rel = relating  # type: ignore[method-assign, assignment]
    try:
        yield greatest
    finally:
        ShapeEnv.produce_guards = produce  # type: ignore[method-assign]
        if relate is not None:
            ShapeEnv._maybe_guard_rel = relate  # type: ignore[method-assign]


def _fixing(
    shapes: ShapeEnv, least: int, greatest: list[tuple[int, str]], free: FreeLengths, lines: Mapping[Any, str]
) -> list[Any]:
    """Returns the conditions that hold neither for all sizes nor, if that goes for all of them, up to one of them.

    Those on several sizes are left to torch, which knows that they are equal.
    """
    known, lengths = dict(shapes.var_to_range), free.symbols()
    bounds = _open_ranges(shapes, least, lengths)
    conditions = [(each, shapes.simplify(each.expr)) for each in shapes.guards]
    free.take(shapes, (condition for _, condition in conditions if condition.free_symbols & lengths))
    conditions = [(each, condition) for each, condition in conditions if not condition.free_symbols & lengths]
    others = [each for each, condition in conditions if len(condition.free_symbols) != 1]
    ours = ((each, condition) for each, condition in conditions if len(condition.free_symbols) == 1)
    reached = [(each, _holds_up_to(condition, least)) for each, condition in ours]
    bounds += [(size, lines.get(each.expr, "")) for each, size in reached if size < _SIZES[-1]]
    if any(size == 0 for size, _ in bounds):
        shapes.var_to_range.update(known)
        return others + [each for each, size in reached if size < _SIZES[-1]]
    greatest += bounds
    return others


def _open_ranges(shapes: ShapeEnv, least: int, lengths: set[Any]) -> list[tuple[int, str]]:
    """Takes bounds out of what a trace has learned of sizes, unless they leave out small ones; returns upper ones."""
    bounds: list[tuple[int, str]] = []
    for symbol, known in list(shapes.var_to_range.items()):
        is_of_batch = symbol in shapes.backed_var_to_val and symbol not in lengths
        if is_of_batch and known.is_int and known.lower <= max(2, least):
            bounds += [] if known.upper == int_oo else [(int(known.upper), "")]
            shapes.var_to_range[symbol] = ValueRanges(min(known.lower, 2), int_oo)
    return bounds


@lru_cache(maxsize=4096)
def _holds_up_to(condition: sympy.Basic, least: int) -> int:
    """Returns the greatest size up to which a condition on one size holds, from `least` on; 0: there is no such size.

    Tried are the small ones, those around powers of two, and those between the last that holds and the next one.
    """

    def holds(size: int) -> bool:
        return bool(condition.xreplace(dict.fromkeys(condition.free_symbols, size)) == sympy.true)

    sizes = [size for size in _SIZES if size >= least]
    held = 0
    for size in itertools.takewhile(holds, sizes):
        held = size
    above = [size for size in sizes if size > held]
    if held and any(map(holds, above)):
        return 0
    between = range(held + 1, above[0] if held and above else held + 1)
    return held + bisect_left(between, True, key=lambda size: not holds(size))


_ROUNDS = 4
_MANY_SAMPLES, _FAR = 2**16, 2**24
"""Above the first, one look is enough, at the second: libraries then ask for each tensor whether it is too large for a
kernel, a size for each; above the second there is no micro-batch."""
Again = Callable[[int, int], tuple[fx.GraphModule, int | None]]


def find_threshold(module: fx.GraphModule, greatest: int | None, again: Again) -> int | None:
    """Returns the greatest batch size for which a graph holds; None: it holds for all.

    Args:
        module: The graph.
        greatest: The batch size up to which the trace has taken this way; None: there is no such size.
        again: Traces again, for batch sizes from its first argument on, the second standing for them; returns as this
            function is given.
    """
    for _ in range(_ROUNDS):
        if greatest is None or greatest >= _FAR:
            return None
        least = greatest + 1 if greatest < _MANY_SAMPLES else _FAR
        try:
            larger, next_greatest = again(least, int(sympy.nextprime(least + 5)))
        except TraceError:
            return greatest
        if any(a != b for a, b in itertools.zip_longest(_lines(larger), _lines(module))):
            return greatest
        greatest = next_greatest
    return greatest


def _lines(module: fx.GraphModule) -> Iterator[str]:
    """Yields what a graph computes, and its regions, without copies into another order of memory."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            names: dict[fx.Node, str] = {}
            count = itertools.count()
            for node in part.graph.nodes:
                if node.target is torch.ops.aten.contiguous.default:
                    names[node] = names[node.args[0]]
                else:
                    names[node] = f"_{next(count)}"
                    yield f"{node.op} {node.target} {fx.map_arg((node.args, node.kwargs), names.__getitem__)}"
