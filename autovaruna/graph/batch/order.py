"""Finds which sample each row is of where a dimension has several of each: sample by sample, in turns, or in any order.

Operations that change how long such a dimension is run on the numbers of samples, for a batch and for its parts; the
others leave rows where they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autovaruna._torch import OpOverload
from autovaruna.graph.batch.interpret import BatchAnalysis, read
from autovaruna.graph.evaluate import call, evaluate
from autovaruna.graph.facts import KnownGraph, tensors_in
from autovaruna.graph.lengths import Sizes, free_value
from autovaruna.graph.operators import Dependence, Trait, arguments, has, is_differentiable, is_random, name_of, reached
from autovaruna.graph.precision import without_autocast

_RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"})
_PARTS = (3, 2)
ALL = sum(_PARTS)
_SIZES = (ALL, *_PARTS)
_BY_SAMPLE = torch.arange(ALL)
_MOST_ELEMENTS = 1 << 22


class _TornError(Exception):
    """Rows of several samples come where those of one belong, or other ones in a micro-batch."""


class SampleOrders:
    """The order of samples in the values of a graph.

    Attributes:
        torn: nodes in which different orders meet, or rows of samples come apart, each with words for that.
    """

    def __init__(self, graph: KnownGraph) -> None:
        self.values, self._sizes = BatchAnalysis(graph), graph.sizes
        self._rows: dict[fx.Node, Tensor | None] = {}
        self._fitting: dict[tuple[fx.Node, int], bool] = {}
        self.torn: dict[fx.Node, str] = {}
        for node in graph.module.graph.nodes if graph.sizes.symbol is not None else ():
            if self.values[node].dependence is Dependence.NONE or node.op == "output":
                continue
            try:
                self._rows[node] = self._found(node)
            except _TornError as error:
                self._rows[node], self.torn[node] = None, str(error)

    def of(self, node: fx.Node) -> Tensor | None:
        """Returns the number of the sample of each row, for a batch of `ALL`; None: it is not known."""
        num_rows = self._num_rows(node)
        return _BY_SAMPLE if num_rows == 1 else self._rows.get(node) if num_rows else None

    def outer(self, node: fx.Node) -> Any:
        """Returns how often all samples come one after the other, as a number or by lengths; None: unknown."""
        if (rows := self.of(node)) is None:
            return None
        outer, num_rows = int(((rows == 0) & (rows.roll(1) != 0)).sum()), len(rows) // ALL
        if num_rows % outer or not torch.equal(rows, _in_turns(num_rows, outer)):
            return None
        if outer == 1 or self._sizes.lengths is None:
            return outer
        length = sympy.cancel(free_value(node).shape[self._grown(node)[0][1]].node.expr / self._sizes.symbol)
        return length if outer == num_rows else None if length.free_symbols else outer

    def fits(self, source: fx.Node, node: fx.Node) -> bool:
        """Whether what follows from sizes alone is, for a micro-batch, what its samples meet of it in a node."""
        others = [each for each in (node, *read(node)) if self.values[each].dependence is not Dependence.NONE]
        alike = [each for each in others if self._num_rows(each) == self._num_rows(source)]
        rows = next((rows for each in alike if (rows := self.of(each)) is not None), self.of(source))
        if rows is None or (source, id(rows)) in self._fitting:
            return rows is None or self._fitting[source, id(rows)]
        self._fitting[source, id(rows)] = found = self._is_alike(source, rows)
        return found

    def _is_alike(self, node: fx.Node, rows: Tensor) -> bool:
        """Whether a value has for the parts the rows that it has for the batch, from drawn state and random numbers."""
        value, sizes = node.meta["val"], self._sizes
        dimension = sizes.batch_dimension(value)
        if dimension is None or sizes.depends_on_data(node) or math.prod(sizes.shape(value, ALL)) > _MOST_ELEMENTS:
            return True

        def is_drawn(each: fx.Node) -> bool:
            is_sized = each.op == "call_function" and self.values[each].dependence is Dependence.NONE
            return not is_sized or is_random(each) or "empty" in name_of(each)

        made_of = reached([node], lambda each: () if is_drawn(each) else _tensors_of(each))
        drawn = {each: self._drawn(each, rows) for each in made_of if is_drawn(each)}
        try:
            whole, *parts = (
                run(node, num, sizes, {each: numbers[part] for each, numbers in drawn.items()})
                for part, num in enumerate(_SIZES)
            )
        except Exception:  # they may have to be other numbers
            return True
        return all(
            torch.equal(whole.index_select(dimension, _places(rows, k)), each) for k, each in enumerate(parts, 1)
        )

    def _drawn(self, node: fx.Node, rows: Tensor) -> list[Tensor]:
        """Returns drawn numbers of a tensor for the batch, and those of its parts."""
        value, generator = node.meta["val"], torch.Generator().manual_seed(0)
        numbers = torch.randn(self._sizes.shape(value, ALL), generator=generator)
        numbers = numbers.to(value.dtype) if is_differentiable(value) else (numbers > 0).to(value.dtype)
        if (dimension := self._sizes.batch_dimension(value)) is None:
            return [numbers.clone() for _ in _SIZES]
        length = numbers.shape[dimension]
        order = rows if len(rows) == length else _in_turns(length // ALL, 1)
        return [numbers.index_select(dimension, _places(order, part)) for part in range(len(_SIZES))]

    def _num_rows(self, node: fx.Node) -> int | None:
        """Returns how many rows each sample has; 0: there are no samples, None: not as many as others, or data say."""
        found = [each.shape[place] for each, place in self._grown(node)]
        if not found:
            return 0
        is_even = self._sizes.is_known(found[0]) and not self._sizes.is_part(found[0])
        return int(self._sizes.number(found[0], ALL)) // ALL if is_even else None

    def _grown(self, node: fx.Node) -> list[tuple[Tensor, int]]:
        """Returns the tensors of a node that have samples, each with the dimension of these."""
        tensors = tensors_in(node.meta.get("val"))
        return [(each, place) for each in tensors if (place := self._sizes.batch_dimension(each)) is not None]

    def _found(self, node: fx.Node) -> Tensor | None:
        """Returns the order of samples in a value that has numbers of them."""
        if node.op == "placeholder":
            return _BY_SAMPLE
        if has(node, Trait.SHAPE_ALONE):  # samples were written into it
            return None
        own, source = self._num_rows(node), node.args[0] if node.args else None
        sources = [each for each in read(node) if self._num_rows(each) != 0]
        counts = {self._num_rows(each) for each in sources}
        if has(node, Trait.BY_INDEX) and (indices := _picking(node, self._sizes)):
            return self._at_places(node, indices)
        if own and name_of(node) in _RESHAPES and source in sources:
            return self._reshaped(node, source)
        is_taken = node.target is getitem and self._rows.get(source) is None  # type: ignore[arg-type]
        if not is_taken and len(counts) == 1 and own in (0, *counts):
            return self._met(node, sources)
        is_one = isinstance(node.meta["val"], Tensor)
        return self._moved(node, source if is_taken else node) if own and is_one else None

    def _met(self, node: fx.Node, sources: Sequence[fx.Node]) -> Tensor | None:
        """Returns the one order that the arguments of a node have."""
        known = [(each, rows) for each in sources if (rows := self._rows.get(each)) is not None]
        for each, rows in known[1:]:
            if not torch.equal(rows, known[0][1]):
                both = f"{known[0][0].name} and {each.name}, each of which has its samples in another order,"
                raise _TornError(f"{both} meet in {node.name}")
        return known[0][1] if known else None

    def _reshaped(self, node: fx.Node, source: Any) -> Tensor | None:
        """Returns where rows are in another shape; of the numbers in a row one stands for those that stay together."""
        if (rows := self.of(source)) is None or any(map(self._sizes.depends_on_data, (node, source))):
            return None
        found = []
        for part, num in enumerate(_SIZES):
            (before, length, after), (new, _, inner) = (self._lengths(each, num) for each in (source, node))
            step = max(math.gcd(after, inner), 1)
            numbers = rows[_places(rows, part)].view(1, -1, 1).expand(before, length, after // step)
            found.append(self._labels(node, numbers.reshape(new, -1, inner // step), 1))
        return self._agreeing(node, found)

    def _lengths(self, node: fx.Node, num_samples: int) -> tuple[int, int, int]:
        """Returns the length of the dimension of samples, between the products of those before and after it."""
        ((value, dimension),) = self._grown(node)
        shape = self._sizes.shape(value, num_samples)
        return math.prod(shape[:dimension]), shape[dimension], math.prod(shape[dimension + 1 :])

    def _moved(self, node: fx.Node, made: Any) -> Tensor | None:
        """Returns where an operation, of which a node may be one result, puts rows."""
        given = {each: self.of(each) for each in _tensors_of(made)}
        is_open = any(rows is None and self._num_rows(each) != 0 for each, rows in given.items())
        if is_open or not isinstance(made.target, OpOverload) or is_random(made):
            return None
        found = []
        for part, num in enumerate(_SIZES):
            try:
                result = run(node, num, self._sizes, {each: self._numbers(each, part) for each in given})
            except Exception:  # it takes other numbers
                return None
            found.append(self._labels(node, result, self._grown(node)[0][1]))
        return self._agreeing(node, found)

    def _numbers(self, node: fx.Node, part: int) -> Tensor:
        """Returns a tensor that has in each row the number of its sample."""
        value, rows = node.meta["val"], self.of(node)
        shape = self._sizes.shape(value, _SIZES[part])
        if rows is None:
            return torch.full(shape, -1, dtype=torch.int8)
        dimension = self._grown(node)[0][1]
        numbers = rows[_places(rows, part)].to(torch.int8)
        return numbers.view(-1, *[1] * (len(shape) - dimension - 1)).expand(shape)

    def _labels(self, node: fx.Node, numbers: Tensor, dimension: int) -> Tensor | None:
        """Returns the number in each row; None: an operation has computed with them."""
        by_row = numbers.movedim(dimension, 0).reshape(numbers.shape[dimension], -1)
        if numbers.is_floating_point() or not ((by_row >= 0) & (by_row < ALL)).all():
            return None
        if not (by_row == by_row[:, :1]).all():
            raise _TornError(_torn(node))
        return by_row[:, 0].long()

    def _agreeing(self, node: fx.Node, found: Sequence[Tensor | None]) -> Tensor | None:
        """Returns the order in the batch, if that in its parts is the same."""
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        whole = known[0]
        is_alike = all(torch.equal(whole[_places(whole, part)], each) for part, each in enumerate(known))
        if not is_alike or (len(whole) == ALL and not torch.equal(whole, _BY_SAMPLE)):
            raise _TornError(_torn(node))
        return whole

    def _at_places(self, node: fx.Node, indices: Sequence[fx.Node]) -> Tensor | None:
        """Returns the order of rows at places that numbers name, or of a value in which something is put there."""
        source: Any = node.args[0]
        masks = [index for index in indices if index.meta["val"].dtype is torch.bool]
        self._met(node, [source, *masks])
        rows, num_rows = self.of(source), self._num_rows(source)
        if rows is None:
            rows = _in_turns(num_rows or 1, 1)
        for index in indices if num_rows else ():
            self._rows[index] = self._rows.get(index) if index in masks else self._picked(node, index, rows)
        if has(node, Trait.PICKS):
            return None if masks else self._rows.get(indices[0])
        self._met(node, [each for each in read(node) if each is not source])
        return self._rows.get(source)

    def _picked(self, node: fx.Node, index: fx.Node, rows: Tensor) -> Tensor | None:
        """Returns whose rows numbers name.

        Nothing is said against numbers that a model finds itself, the places of what is largest: it has these rows.
        """

        def is_given(each: fx.Node) -> bool:
            return each.op == "placeholder" or is_random(each)

        def is_found(each: fx.Node) -> bool:
            return not is_given(each) and (not isinstance(each.target, OpOverload) or has(each, Trait.FINDS_PLACES))

        made_of = list(reached([index], lambda each: () if is_given(each) else _tensors_of(each)))
        dimension = self._sizes.batch_dimension(index.meta["val"])
        if dimension is None or any(map(is_found, made_of)):
            return None
        given = [(each, each.meta["val"]) for each in made_of if is_given(each)]
        found = []
        for part, num in enumerate(_SIZES):
            ones = {each: torch.ones(self._sizes.shape(value, num), dtype=value.dtype) for each, value in given}
            try:
                picked = rows[_places(rows, part)][run(index, num, self._sizes, ones)]
            except Exception:  # they may have to be other numbers
                return None
            found.append(self._labels(node, picked, dimension))
        return self._agreeing(node, found)


def _in_turns(num_rows: int, outer: int) -> Tensor:
    """Returns the order in which all samples come `outer` times one after the other."""
    return _BY_SAMPLE.repeat_interleave(num_rows // outer).repeat(outer)


def _torn(node: fx.Node) -> str:
    shape = tuple(node.meta["val"].shape)
    return f"{node.name}, of the shape {shape}, has rows of other samples than a micro-batch would have there"


def _tensors_of(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.all_input_nodes if tensors_in(each.meta.get("val"))]


def _picking(node: fx.Node, sizes: Sizes) -> list[fx.Node]:
    """Returns the numbers by which a node picks along the batch."""
    given = arguments(node)
    indices = given.get("indices", given.get("index"))
    pairs = enumerate(indices) if isinstance(indices, list | tuple) else [(given.get("dim", 0), indices)]
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return [index for dim, index in pairs if isinstance(index, fx.Node) and sizes.grows(shape[dim])]


def _places(rows: Tensor, part: int) -> Tensor:
    """Returns the places of rows of the batch (0) or of one of its parts (1 and 2), by the sample of each row."""
    return ((rows >= _PARTS[0]) == (part == 2)).nonzero().flatten() if part else torch.arange(len(rows))


def run(node: fx.Node, num_samples: int, sizes: Sizes, known: Mapping[fx.Node, Any]) -> Tensor:
    """Computes what a node gives for a batch of some size; `known` has what is drawn."""

    def is_run(each: fx.Node) -> bool:
        return each not in known and isinstance(each.meta.get("val"), Tensor | list | tuple)

    def value_of(each: fx.Node) -> Any:
        return known[each] if each in known else sizes.number(each.meta.get("val"), num_samples)

    def run_here(each: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with without_autocast():
            return call(each, args, {name: "cpu" if name == "device" else given for name, given in kwargs.items()})

    made_of = reached([node], lambda each: each.all_input_nodes if is_run(each) else ())
    found: Tensor = evaluate(sorted(filter(is_run, made_of)), value_of, [node], run_here)[node]
    return found
