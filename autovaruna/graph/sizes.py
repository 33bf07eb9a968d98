"""Evaluates the sizes of a traced graph for a micro-batch: shapes are expressions in one symbol, the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autovaruna.graph.batch.values import is_of_batch
from autovaruna.graph.lengths import Lengths
from autovaruna.graph.records import Size


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
        is_size = node.op == "call_function" and not isinstance(value, Tensor) and self._is_known(value)
        return is_size or is_of_batch(node)

    def depends_on_data(self, node: fx.Node) -> bool:
        """Whether a node is a number, or has a shape, that depends on the contents of tensors."""
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return not all(self._is_known(length) for length in value.shape)
        return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and not self._is_known(value)

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
        """Returns the shape of a traced value for a micro-batch of `batch_size` samples."""
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

    def mixes_samples(self, value: Tensor) -> bool:
        """Whether two dimensions of a value grow with the batch: samples meet each other in it."""
        return self.symbol is not None and sum(self.grows(length) for length in value.shape) > 1

    def grows(self, length: Any) -> bool:
        """Whether a size grows with the batch."""
        expression = _expression(length)
        return isinstance(expression, sympy.Basic) and self.symbol in expression.free_symbols

    def is_part(self, length: Any) -> bool:
        """Whether a size follows from that of the batch, but is no multiple of it: some samples are left out."""
        if not self.grows(length) or not self._is_known(length):
            return False
        sizes = (840, 1680)  # which any small number divides
        small, large = (self.number(length, size) for size in sizes)
        return bool(small % sizes[0] or large != 2 * small)

    def _is_known(self, value: Any) -> bool:
        expression = _expression(value)
        if isinstance(expression, sympy.Basic):
            return bool(expression.free_symbols <= ({self.symbol} if self.symbol is not None else set()))
        return isinstance(value, int | float | bool)


def _number(value: Any, symbols: tuple[sympy.Symbol, ...], numbers: tuple[int, ...]) -> Any:
    expression = _expression(value)
    if not isinstance(expression, sympy.Basic):
        return expression
    number = _at(expression, symbols, numbers)
    if isinstance(value, torch.SymBool):
        return bool(number)
    return float(number) if isinstance(value, torch.SymFloat) else int(number)


@lru_cache(maxsize=4096)
def _at(expression: Any, symbols: tuple[sympy.Symbol, ...], numbers: tuple[int, ...]) -> Any:
    """Returns an expression for some sizes; in a deep model the same few come again and again."""
    return expression.subs(list(zip(symbols, numbers, strict=True)))


def _expression(value: Any) -> Any:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.expr
    return value
