"""Refuses what changes once there are more samples than a part of the batch has: counts over them, and their places."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autovaruna.errors import TraceError
from autovaruna.graph.batch.drawn import ALL, run
from autovaruna.graph.batch.interpret import BatchAnalysis, is_long
from autovaruna.graph.export.errors import FOR_COUNTS
from autovaruna.graph.facts import KnownGraph
from autovaruna.graph.operators import (
    EMPTY,
    Dependence,
    Linearity,
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
_AT_ZERO, _AT_ONE = ("relu", "sign"), ("floor", "ceil", "round", "trunc")
_MOST_ELEMENTS, _ANY = 1 << 22, 1 << 40


class _Count(NamedTuple):
    """A value that is `scale` times a count over samples, and `offset`; of each sample `rows` may count."""

    scale: float
    offset: float
    rows: int


def thresholds(graph: KnownGraph, values: BatchAnalysis, joining: Collection[fx.Node]) -> tuple[Threshold, ...]:
    """Returns where something else is made of a count over samples once it is above a number, or of their places."""
    counts: dict[fx.Node, _Count] = {}
    found = list[Threshold]()
    for node in graph.module.graph.nodes:
        if _is_by_place(node, graph, values):
            found.append(Threshold(node.name))
        if (number := _first_of_picked(node, graph)) > 1.0:
            found.append(Threshold(node.name, number, _ANY))
        if node.op != "call_function" or not Dependence.NONE < values[node].dependence < Dependence.SAMPLES:
            continue
        source = next((each for each in node.all_input_nodes if each in counts), None)
        if source is None:
            if node in joining or (adds_up(node) and values[node].dependence is Dependence.COUNTS_OF_SEVERAL):
                counts[node] = _Count(1.0, 0.0, _rows(node, graph))
            continue
        bounds = [*_bounds(node, source, graph, values)]
        if bounds and (users := [each for each in _decided(node) if graph.facts[each.name].needs_gradient]):
            scale, offset, rows = counts[source]
            shift = math.copysign(_COMPARES.get(name_of(node), 0.0), scale * _COMPARES.get(name_of(node), 0.0))
            places = [(bound - offset) / scale + shift for bound in bounds if scale]
            meets = any(map(is_long, users))
            found += [Threshold(node.name, place, rows, meets) for place in places if not place <= 1.0]
        elif not bounds and isinstance(node.meta["val"], Tensor) and node.meta["val"].dtype is not torch.bool:
            counts[node] = _scaled(node, counts[source])
    return tuple(found)


def _rows(node: fx.Node, graph: KnownGraph) -> int:
    """Returns how many elements of each sample a count is made of, at most."""

    def num_elements(each: fx.Node) -> int:
        value = each.meta["val"]
        return math.prod(graph.sizes.shape(value, ALL)) if isinstance(value, Tensor) else 0

    if any(map(graph.sizes.depends_on_data, (node, *node.all_input_nodes))):
        return _ANY
    num_counts = num_elements(node) // (ALL if is_long(node) else 1)
    return max(1, max(map(num_elements, node.all_input_nodes)) // max(1, num_counts) // ALL)


def _bounds(node: fx.Node, count: fx.Node, graph: KnownGraph, values: BatchAnalysis) -> Iterator[float]:
    """Yields the numbers with which a node compares a count; NaN: it may be any."""
    name, given = name_of(node), arguments(node)
    if name in _COMPARES or name in _DIVIDES:
        others = [each for each in node.args[:2] if each is not count]
    else:
        others = [given[each] for each in _CLAMPS.get(name, ()) if given.get(each) is not None]
    is_cast = name in ("to", "_to_copy") and is_differentiable(count.meta["val"]) > is_differentiable(node.meta["val"])
    if name in _AT_ZERO or name in _AT_ONE or (is_cast and node.meta["val"].dtype is not torch.bool):
        yield float(name not in _AT_ZERO)
    for each in others:
        if isinstance(each, int | float):
            yield float(each)
        elif not isinstance(each, fx.Node):
            continue
        elif is_of_batch(each) or values[each].dependence is Dependence.COUNTS_OF_SEVERAL:
            yield math.nan
        elif isinstance(each.meta["val"], Tensor) and not each.meta["val"].dim():
            (*_, source) = reached([each], lambda node: node.all_input_nodes)
            if source.op == "get_attr":
                held = graph.constants.get(str(source.target))
                yield math.nan if held is None else float(held)


def _first_of_picked(node: fx.Node, graph: KnownGraph) -> float:
    """Returns how many of those elements that were picked in the batch a node keeps; 0: it does not."""
    if name_of(node) != "slice":
        return 0.0
    given = arguments(node)
    if graph.sizes.is_known(given["self"].meta["val"].shape[given["dim"]]):
        return 0.0
    ends = [given[each] for each in ("start", "end")]
    return float(max((abs(each) for each in ends if isinstance(each, int) and each < _ANY), default=0))


def _scaled(node: fx.Node, count: _Count) -> _Count:
    """Returns what becomes of a count in a node that takes numbers away, or scales it."""
    name, (first, second) = name_of(node), (*node.args, None, None)[:2]
    number = second if isinstance(first, fx.Node) else first
    if not isinstance(number, int | float):
        return count
    linearity, by = operator_of(node).linearity, float(number)
    if linearity is Linearity.MULTIPLY or (linearity is Linearity.DIVIDE and by):
        by = by if linearity is Linearity.MULTIPLY else 1.0 / by
        return _Count(count.scale * by, count.offset * by, count.rows)
    sign = {"add": 1.0, "add_": 1.0, "sub": -1.0, "sub_": -1.0}.get(name, 0.0)
    if name == "rsub":
        return _Count(-count.scale, by - count.offset, count.rows)
    return count._replace(offset=count.offset + sign * by)


def _decided(node: fx.Node) -> Iterator[fx.Node]:
    return reached([node], lambda each: [user for user in each.users if user.op != "output" and not is_of_batch(user)])


def _is_by_place(node: fx.Node, graph: KnownGraph, values: BatchAnalysis) -> bool:
    """Whether a value follows from sizes and places alone, and real numbers of samples, or weights, go by it."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not _is_sized(node, graph, values):
        return False
    if not is_long(node):
        return value.dtype is torch.bool and any(each.op == "call_function" for each in node.all_input_nodes)

    def goes_by(user: fx.Node) -> bool:
        if has(user, Trait.BY_INDEX) and user.args[0] is not node and graph.sizes.has_samples(user.args[0]):  # type: ignore[arg-type]
            return False
        result = user.meta.get("val")
        is_exact = isinstance(result, Tensor) and not is_differentiable(result) and value.dtype is not torch.bool
        return not is_exact and not _is_sized(user, graph, values)

    return any(map(goes_by, node.users))


def _is_sized(node: fx.Node, graph: KnownGraph, values: BatchAnalysis) -> bool:
    """Whether a value is made of sizes and constants alone."""
    if node.op == "output" or values[node].dependence is not Dependence.NONE:
        return False
    return all(
        str(each.target) in graph.constants if each.op == "get_attr" else not _is_chance(each)
        for each in reached([node], lambda each: () if graph.sizes.is_given(each) else each.all_input_nodes)
    )


def _is_chance(node: fx.Node) -> bool:
    return node.op != "call_function" or is_random(node) or is_of_batch(node) or name_of(node) in EMPTY


def refuse_thresholds(traced: TracedModel, num_samples: int, name: str, is_exact: bool) -> None:
    """Makes sure that nothing is other above a number of samples that parts of a batch do not reach.

    If it is not `is_exact`, a loss may go by what its micro-batch has.

    Raises:
        TraceError: something is.
    """
    for each in traced.thresholds:
        node = traced.nodes[each.node]
        if each.rows and (each.meets_samples or is_exact) and not each.number >= num_samples * each.rows:
            above = "another number" if math.isnan(each.number) else f"{math.floor(each.number)}"
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
    cone = reached([node], lambda each: () if sizes.is_given(each) else each.all_input_nodes)
    held: dict[fx.Node, Any] = {
        each: traced.constants[str(each.target)].cpu() for each in cone if each.op == "get_attr"
    }
    whole, *parts = (run(node, each, sizes, held) for each in (size, size // 2, size - size // 2))
    if (dimension := sizes.batch_dimension(value)) is None:
        return not all(torch.equal(each, whole) for each in parts)
    rows = whole.shape[dimension] // size
    outers = [outer for outer in range(1, rows + 1) if rows % outer == 0]
    return not any(torch.equal(joined(parts, dimension, outer), whole) for outer in outers)
