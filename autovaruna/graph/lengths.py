"""Evaluates sizes of a traced graph for a micro-batch, and for lengths of inputs that vary from call to call.

Shapes are expressions in one symbol, the batch, and one for each such length. Whatever is asked of such a graph is
asked for the lengths that it was traced with: ``meta["val"]`` of its nodes has them as numbers. What has the
symbols is ``meta["free"]``, from which a stage that runs gets the numbers of its call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autovaruna._torch import pytree
from autovaruna.errors import TraceError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.operators import is_of_batch
from autovaruna.graph.records import Size

FREE = "free"
Places = frozenset[tuple[int, int]]
"""Dimensions of inputs: the number of the input, and that of its dimension."""
_SOME_SIZES = (2, 3, 4, 7, 8, 16, 32, 64, 128)
_MOST_KNOWN = 64


@dataclass(frozen=True)
class Sizes:
    """Evaluates sizes in terms of the batch symbol.

    `symbol` is None for a graph that was traced for `batch_size` samples alone. `lengths` are others that vary.
    """

    symbol: sympy.Symbol | None
    batch_size: int
    lengths: Lengths | None = None

    def is_given(self, node: fx.Node) -> bool:
        """Whether a stage is given the value of a node: a number that follows from the batch size, or `of_batch`."""
        value = node.meta.get("val")
        is_size = node.op == "call_function" and not isinstance(value, Tensor) and self.is_known(value)
        return is_size or is_of_batch(node)

    def depends_on_data(self, node: fx.Node) -> bool:
        """Whether a node is a number, or has a shape, that depends on the contents of tensors."""
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return not all(self.is_known(length) for length in value.shape)
        return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and not self.is_known(value)

    def number(self, value: Any, batch_size: int) -> Any:
        """Returns a size (a number or an expression) for a micro-batch of `batch_size` samples."""
        symbols, numbers = ((), ()) if self.symbol is None else ((self.symbol,), (batch_size,))
        return _number(value, symbols, numbers)

    def in_call(self, value: Any, batch_size: int, lengths: tuple[int, ...]) -> Any:
        """Returns what a node's `free_value` is for a micro-batch in a call of such lengths: a number, or a shape."""
        if isinstance(value, Tensor):
            return tuple(self.in_call(length, batch_size, lengths) for length in value.shape)
        if self.lengths is None:
            return self.number(value, batch_size)
        batch = () if self.symbol is None else (self.symbol,)
        return _number(value, (*self.lengths.symbols, *batch), (*lengths, batch_size)[: len(lengths) + len(batch)])

    def shape(self, value: Tensor, batch_size: int) -> tuple[int, ...]:
        return tuple(self.number(length, batch_size) for length in value.shape)

    def num_bytes(self, value: Tensor) -> Size:
        """Returns the bytes of a traced value as a line through two batch sizes."""
        if self.symbol is None:
            total = math.prod(self.shape(value, self.batch_size)) * value.element_size()
            is_batch = self.batch_size in value.shape
            return Size(0.0, total / self.batch_size) if is_batch else Size(float(total), 0.0)
        low, high = (math.prod(self.shape(value, size)) * value.element_size() for size in (16, 32))
        slope = (high - low) / 16
        return Size(low - 16 * slope, slope)

    def batch_dimension(self, value: Tensor) -> int | None:
        """Returns the dimension of a traced value that grows with the batch; None: no dimension does."""
        for dimension, length in enumerate(value.shape):
            if self.symbol is None and length == self.batch_size:
                return dimension
            if self.symbol is not None and self.grows(length):
                return dimension
        return None

    def has_samples(self, node: fx.Node) -> bool:
        """Whether a value grows with the batch, or with what was counted in it."""
        value = node.meta.get("val")
        return isinstance(value, Tensor) and (self.batch_dimension(value) is not None or self.depends_on_data(node))

    def grows(self, length: Any) -> bool:
        expression = _expression(length)
        return isinstance(expression, sympy.Basic) and self.symbol in expression.free_symbols

    def is_part(self, length: Any) -> bool:
        """Whether a size follows from that of the batch, but is no multiple of it: some samples are left out."""
        if not self.grows(length) or not self.is_known(length):
            return False
        sizes = (840, 1680)  # which any small number divides
        small, large = (self.number(length, size) for size in sizes)
        return bool(small % sizes[0] or large != 2 * small)

    def is_known(self, value: Any) -> bool:
        """Whether a size is a number, or follows from that of the batch."""
        expression = _expression(value)
        if isinstance(expression, sympy.Basic):
            return bool(expression.free_symbols <= ({self.symbol} if self.symbol is not None else set()))
        return isinstance(value, int | float | bool)


def _number(value: Any, symbols: tuple[sympy.Symbol, ...], numbers: tuple[int, ...]) -> Any:
    expression = _expression(value)
    if not isinstance(expression, sympy.Basic):
        return expression
    return _plain_of(value, _at(expression, symbols, numbers))


def _plain_of(size: Any, number: Any) -> Any:
    """Returns a number as Python has it, of the kind that a size is."""
    if isinstance(size, torch.SymBool):
        return bool(number)
    return float(number) if isinstance(size, torch.SymFloat) else int(number)


@lru_cache(maxsize=4096)
def _at(expression: Any, symbols: tuple[sympy.Symbol, ...], numbers: tuple[int, ...]) -> Any:
    """Returns an expression for some sizes; in a deep model the same few come again and again."""
    return expression.subs(list(zip(symbols, numbers, strict=True)))


def _expression(value: Any) -> Any:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.expr
    return value


@dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths for which a graph holds.

    Attributes:
        batch: the symbol of the batch size; None: it is fixed.
        shapes: for each input, what its dimensions are: numbers and expressions; that of the batch is left out.
        conditions: what must hold besides, for micro-batches of any size.
    """

    batch: sympy.Symbol | None
    symbols: tuple[sympy.Symbol, ...]
    shapes: tuple[Mapping[int, Any], ...]
    conditions: tuple[sympy.Basic, ...]
    _known: dict[tuple[tuple[int, ...], ...], tuple[int, ...] | None] = field(default_factory=dict, repr=False)

    @property
    def places(self) -> Places:
        """The dimensions that may vary."""
        return frozenset(
            (index, dimension)
            for index, shape in enumerate(self.shapes)
            for dimension, length in shape.items()
            if isinstance(length, sympy.Basic)
        )

    def of(self, call: CallSpec) -> tuple[int, ...] | None:
        """Returns the lengths of a call in the order of the symbols; None: the graph does not hold for them."""
        shapes = tuple(spec.shape for spec in call.inputs)
        if shapes not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[shapes] = self._fitting(shapes)
        return self._known[shapes]

    def _fitting(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        pairs = [(length, shapes[i][d]) for i, shape in enumerate(self.shapes) for d, length in shape.items()]
        numbers: dict[Any, Any] = {}
        for length, number in pairs:
            if isinstance(length, sympy.Symbol):
                numbers.setdefault(length, sympy.Integer(number))
        if not numbers.keys() >= set(self.symbols):
            return None
        for length, number in pairs:
            if (length.xreplace(numbers) if isinstance(length, sympy.Basic) else length) != number:
                return None
        if not all(self._holds(condition, numbers) for condition in self.conditions):
            return None
        return tuple(int(numbers[symbol]) for symbol in self.symbols)

    def _holds(self, condition: sympy.Basic, numbers: Mapping[Any, Any]) -> bool:
        found = condition.xreplace(dict(numbers))
        if self.batch is None or self.batch not in found.free_symbols:
            return bool(found == sympy.true)
        return all(found.xreplace({self.batch: sympy.Integer(size)}) == sympy.true for size in _SOME_SIZES)


def find_lengths(
    module: fx.GraphModule, call: CallSpec, is_dynamic: bool, conditions: Collection[sympy.Basic]
) -> Lengths | None:
    """Finds the lengths that are symbols in a graph of torch.export, and puts numbers in their place.

    Returns None if the model has fixed them all.
    """
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    batch = None
    shapes = []
    for value, spec in zip(values, call.inputs, strict=True):
        batch = _plain(value.shape[0]) if spec.is_batch and is_dynamic else batch
        shapes.append({d: _plain(length) for d, length in enumerate(value.shape) if d or not spec.is_batch})
    lengths = [each for shape in shapes for each in shape.values() if isinstance(each, sympy.Basic)]
    found = {symbol for each in lengths for symbol in each.free_symbols}
    if not found:
        return None
    made = Lengths(batch, tuple(sorted(found, key=str)), tuple(shapes), tuple(conditions))
    own = made.of(call)
    if own is None:
        raise TraceError("what a length may be cannot be told")
    numbers = dict(zip(made.symbols, map(sympy.Integer, own), strict=True))
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if _has(value, numbers):
            node.meta[FREE] = value
            node.meta["val"] = pytree.tree_map(lambda leaf: _with(leaf, numbers), value)
    return made


def _plain(length: Any) -> Any:
    """Returns a length as a number, or as an expression."""
    expression = length.node.expr if isinstance(length, torch.SymInt) else length
    return int(expression) if isinstance(expression, int | sympy.Integer) else expression


def free_value(node: fx.Node) -> Any:
    """Returns the value of a node in which lengths are symbols."""
    return node.meta.get(FREE, node.meta.get("val"))


def _has(value: Any, numbers: Mapping[Any, Any]) -> bool:
    leaves = [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)
    return any(_free(size) & numbers.keys() for leaf in leaves for size in _sizes(leaf))


def _sizes(leaf: Any) -> Sequence[Any]:
    return (*leaf.shape, *leaf.stride()) if isinstance(leaf, Tensor) else (leaf,)


def _free(size: Any) -> set[Any]:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else set()


def _with(leaf: Any, numbers: Mapping[Any, Any]) -> Any:
    if not isinstance(leaf, Tensor):
        return _number_at(leaf, numbers)
    if not _has(leaf, numbers):
        return leaf
    shape, strides = ([_number_at(each, numbers) for each in sizes] for sizes in (leaf.shape, leaf.stride()))
    mode: Any = leaf.fake_mode  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        made = torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)


def _number_at(size: Any, numbers: Mapping[Any, Any]) -> Any:
    if not _free(size) & numbers.keys():
        return size
    expression, symbols = size.node.expr.xreplace(dict(numbers)), size.node.shape_env
    if not expression.free_symbols:
        return _plain_of(size, expression)
    if isinstance(size, torch.SymBool):
        return symbols.create_symboolnode(expression)
    make = symbols.create_symfloatnode if isinstance(size, torch.SymFloat) else symbols.create_symintnode
    return make(expression, hint=size.node.hint)
