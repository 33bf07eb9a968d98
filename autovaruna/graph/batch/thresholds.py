"""Refuses what changes once there are more samples than a part of the batch has: counts over them, and their places."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autovaruna.errors import TraceError
from autovaruna.graph.batch.interpret import BatchAnalysis, is_long
from autovaruna.graph.batch.order import ALL, run
from autovaruna.graph.export.errors import FOR_COUNTS
from autovaruna.graph.facts import KnownGraph
from autovaruna.graph.operators import (
    EMPTY,
    SCALING,
    Dependence,
    Trait,
    adds_up,
    arguments,
    has,
    is_differentiable,
    is_of_batch,
    is_random,
    name_of,
    operator_of,
    reached,
)
from autovaruna.graph.source_lines import origin
from autovaruna.graph.traced import Threshold, TracedModel, joined

_COMPARES = {"gt": 0.5, "le": 0.5, "lt": -0.5, "ge": -0.5, "eq": 0.5, "ne": 0.5, "maximum": 0.0, "minimum": 0.0}
"""Where between two counts the result changes, seen from the number."""
_DIVIDES = ("floor_divide", "remainder", "fmod")
_CLAMPS = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}
_ROUNDS = ("relu", "sign", "floor", "ceil", "round", "trunc", "to", "_to_copy")
_MOVES = ("add", "add_", "sub", "sub_", "rsub")
_MOST_ELEMENTS, _ANY = 1 << 22, 1 << 40


def thresholds(graph: KnownGraph, values: BatchAnalysis, joining: Collection[fx.Node]) -> tuple[Threshold, ...]:
    """Returns where something else is made of a count over samples once it is above a number, or of their places."""
    found = list[Threshold]()
    rows: dict[fx.Node, int] = {}  # by count: how many elements of a sample may count
    moved = set[fx.Node]()  # counts from which numbers were taken away, or that were scaled
    for node in graph.module.graph.nodes:
        value, dependence = node.meta.get("val"), values[node].dependence
        if _is_by_place(node, graph, values):
            found.append(Threshold(node.name))
        if number := _first_of_picked(node, graph):
            found.append(Threshold(node.name, number, _ANY))
        if not isinstance(value, Tensor) or not Dependence.NONE < dependence < Dependence.SAMPLES:
            continue
        count = next((each for each in node.all_input_nodes if each in rows), None)
        if count is None and (node in joining or (adds_up(node) and dependence is Dependence.COUNTS_OF_SEVERAL)):
            rows[node] = _rows(node, graph)
        elif count is not None:
            bounds = [*_bounds(node, count, graph, values, count in moved)]
            users = [each for each in _made_of(node) if graph.facts[each.name].needs_gradient] if bounds else []
            meets = any(map(is_long, users))
            found += [Threshold(node.name, each, rows[count], meets) for each in bounds if users]
            if not bounds and value.dtype is not torch.bool:
                rows[node] = rows[count]
                if count in moved or _moves(node):
                    moved.add(node)
    return tuple(found)


def _rows(node: fx.Node, graph: KnownGraph) -> int:
    def num_elements(each: fx.Node) -> int:
        value = each.meta["val"]
        return math.prod(graph.sizes.shape(value, ALL)) if isinstance(value, Tensor) else 0

    if any(map(graph.sizes.depends_on_data, (node, *node.all_input_nodes))):
        return _ANY
    num_counts = num_elements(node) // (ALL if is_long(node) else 1)
    return max(1, max(map(num_elements, node.all_input_nodes)) // max(1, num_counts) // ALL)


def _moves(node: fx.Node) -> bool:
    """Whether a node takes a number away, other than one, or scales by it."""
    numbers = [each for each in node.args[:2] if isinstance(each, int | float)]
    return bool(numbers) and (operator_of(node).linearity in SCALING or (name_of(node) in _MOVES and numbers != [1]))


def _bounds(
    node: fx.Node, count: fx.Node, graph: KnownGraph, values: BatchAnalysis, is_moved: bool
) -> Iterator[float | sympy.Expr]:
    """Yields the numbers with which a node compares a count, some by the size of the batch; NaN: it may be any."""
    name, given = name_of(node), arguments(node)
    others: list[Any] = [given[each] for each in _CLAMPS.get(name, ()) if given.get(each) is not None]
    if name in _COMPARES or name in _DIVIDES:
        others = [each for each in node.args[:2] if each is not count]
    is_rounded = name in _ROUNDS and not (
        node.meta["val"].dtype is torch.bool or (name in ("to", "_to_copy") and is_differentiable(node.meta["val"]))
    )
    if is_moved and (is_rounded or others):
        yield math.nan
        return
    for each in others:
        value = each.meta["val"] if isinstance(each, fx.Node) else each
        if isinstance(value, int | float):
            yield float(value) + _COMPARES.get(name, 0.0)
        elif isinstance(value, torch.SymInt | torch.SymFloat):
            yield value.node.expr if graph.sizes.is_given(each) else math.nan
        elif is_of_batch(each) or values[each].dependence is Dependence.COUNTS_OF_SEVERAL:
            yield math.nan
        elif not value.dim() and (held := [*reached([each], lambda node: node.all_input_nodes)][-1]).op == "get_attr":
            constant = graph.constants.get(str(held.target))
            yield math.nan if constant is None else float(constant) + _COMPARES.get(name, 0.0)


def _first_of_picked(node: fx.Node, graph: KnownGraph) -> float:
    """Returns how many of those elements that were picked in the batch a node keeps; 0: it does not."""
    given = arguments(node)
    if name_of(node) != "slice" or graph.sizes.is_known(given["self"].meta["val"].shape[given["dim"]]):
        return 0.0
    ends = [given[each] for each in ("start", "end")]
    return float(max((abs(each) for each in ends if isinstance(each, int) and each < _ANY), default=0))


def _made_of(node: fx.Node) -> Iterator[fx.Node]:
    return reached([node], lambda each: [user for user in each.users if user.op != "output" and not is_of_batch(user)])


def _is_by_place(node: fx.Node, graph: KnownGraph, values: BatchAnalysis) -> bool:
    """Whether a value follows from sizes and places alone, and real numbers of samples, or weights, go by it."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not _is_sized(node, graph, values):
        return False
    is_truth = value.dtype is torch.bool
    if not is_long(node):
        return is_truth and any(each.op == "call_function" for each in node.all_input_nodes)

    def goes_by(user: fx.Node) -> bool:
        source, result = user.args[0], user.meta.get("val")
        is_place = has(user, Trait.BY_INDEX) and source is not node and graph.sizes.has_samples(source)  # type: ignore[arg-type]
        is_exact = isinstance(result, Tensor) and not is_differentiable(result) and not is_truth
        is_free = is_place or is_exact or has(user, Trait.IN_BAGS)  # where bags begin, of whose rows it is known
        return not is_free and not _is_sized(user, graph, values)

    return any(map(goes_by, node.users))


def _is_sized(node: fx.Node, graph: KnownGraph, values: BatchAnalysis) -> bool:
    """Whether a value is made of sizes and constants alone."""

    def is_known(each: fx.Node) -> bool:
        if each.op != "call_function":
            return each.op == "get_attr" and str(each.target) in graph.constants
        return not is_random(each) and not is_of_batch(each) and name_of(each) not in EMPTY

    return values[node].dependence is Dependence.NONE and all(map(is_known, _cone(node, graph)))


def _cone(node: fx.Node, graph: KnownGraph) -> Iterator[fx.Node]:
    return reached([node], lambda each: () if graph.sizes.is_given(each) else each.all_input_nodes)


def refuse_thresholds(traced: TracedModel, num_samples: int, name: str, is_exact: bool) -> None:
    """Makes sure that nothing is other above a number of samples that parts of a batch do not reach.

    If it is not `is_exact`, a loss may go by what its micro-batch has.

    Raises:
        TraceError: something is.
    """
    for each in traced.thresholds:
        node, number = traced.nodes[each.node], each.number
        if isinstance(number, sympy.Expr):
            number = float(number.subs(traced.sizes.symbol, num_samples))
        is_free = number <= 1.0 or number >= num_samples * each.rows or not (each.meets_samples or is_exact)
        if each.rows and not is_free:
            above = "another number" if math.isnan(number) else f"{math.floor(number)}"
            what = f"goes by whether a count over the samples is above {above}, which it may be in a batch of "
            what += f"{num_samples} samples and not in its micro-batches,"
        elif not each.rows and _differs_by_place(node, traced, num_samples):
            what = "is made of the places of samples in the batch, which begin anew in each micro-batch,"
        else:
            continue
        raise TraceError(
            f"{name} mixes the samples of a batch: {each.node} {what} at {origin(node) or each.node}. {FOR_COUNTS}"
        )


def _differs_by_place(node: fx.Node, traced: TracedModel, num_samples: int) -> bool:
    sizes, value = traced.sizes, node.meta["val"]
    if sizes.depends_on_data(node):
        return False
    size = min(num_samples, _MOST_ELEMENTS // max(1, math.prod(sizes.shape(value, ALL)) // ALL))
    attributes = [each for each in _cone(node, traced) if each.op == "get_attr"]
    held = {each: traced.constants[str(each.target)].cpu() for each in attributes}
    whole, *parts = (run(node, each, sizes, held) for each in (size, size // 2, size - size // 2))
    if (dimension := sizes.batch_dimension(value)) is None:
        return not all(torch.equal(each, whole) for each in parts)
    rows = whole.shape[dimension] // size
    outers = [outer for outer in range(1, rows + 1) if rows % outer == 0]
    return not any(torch.equal(joined(parts, dimension, outer), whole) for outer in outers)
