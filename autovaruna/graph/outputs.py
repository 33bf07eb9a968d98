"""Says what the outputs of a traced model are: its loss, tensors of samples, or plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autovaruna.errors import TraceError
from autovaruna.graph.facts import Fact, KnownGraph, tensors_in
from autovaruna.graph.lengths import Sizes, free_value
from autovaruna.graph.source_lines import origin


class OutputKind(str, Enum):
    """How the outputs of the micro-batches become the output of the global batch."""

    LOSS = "loss"
    """The scalar that the step differentiates: a weighted mean (or a sum)."""
    SAMPLES = "samples"
    """Grows with the batch: each rank gets the part of its own samples."""
    MEAN = "mean"
    """A floating-point tensor without a batch dimension: a weighted mean."""
    TOTAL = "total"
    """An integer tensor without a batch dimension: a sum."""
    SAME = "same"
    """Does not depend on the batch: that of micro-batch 0."""


@dataclass(frozen=True)
class OutputSpec:
    """One tensor that the model returns.

    Attributes:
        path: where it stands in what the model returns.
        dimension: the batch dimension of an output of samples.
        needs_gradient: whether a backward can start from it.
        outer: how often all samples come one after the other in that dimension, a number or an expression of lengths:
            ``time`` where ``(time, batch)`` was made one dimension.
    """

    node: str
    path: str
    kind: OutputKind
    dimension: int
    needs_gradient: bool
    outer: Any = 1


def joined(parts: Sequence[Tensor], dimension: int, outer: int) -> Tensor:
    """Returns an output of all samples, of those that micro-batches made."""
    if outer == 1:
        return torch.cat(list(parts), dimension)
    return torch.cat([opened(each, dimension, outer) for each in parts], dimension + 1).flatten(
        dimension, dimension + 1
    )


def opened(tensor: Tensor, dimension: int, outer: int) -> Tensor:
    """Returns a tensor whose `dimension` is two, of which the second has the samples."""
    before, after = tensor.shape[:dimension], tensor.shape[dimension + 1 :]
    return tensor.reshape(*before, outer, tensor.shape[dimension] // outer, *after)


def classify(graph: KnownGraph, paths: Sequence[str], loss_mode: str) -> tuple[OutputSpec, ...]:
    """Classifies the outputs of a graph; `loss_mode` is ``loss`` (it has one), ``outputs`` (it has none) or ``auto``.

    Raises:
        TraceError: ``loss`` is asked for and no single output can be it.
    """
    nodes: list[fx.Node] = list(graph.module.graph.output_node().args[0])  # type: ignore[arg-type]
    fed, outer = _fed_by_batch(graph.module.graph), _outer_lengths(graph.module.graph, graph.sizes)
    specs = [_classify_one(node, path, graph, fed, outer) for node, path in zip(nodes, paths, strict=True)]
    place = None if loss_mode == "outputs" else _find_loss(specs, graph.facts)
    if place is None and loss_mode == "loss":
        found = {spec.path: spec.kind.value for spec in specs}
        raise TraceError(
            f"loss_mode='loss' needs one differentiable scalar among the outputs: got {found}. Return the loss "
            "alone or under the key 'loss', or pass loss_mode='outputs'."
        )
    if place is not None:
        loss = specs[place]
        specs[place] = OutputSpec(loss.node, loss.path, OutputKind.LOSS, 0, True)
    return tuple(specs)


def _classify_one(
    node: fx.Node, path: str, graph: KnownGraph, fed: set[fx.Node], outer: dict[fx.Node, Any]
) -> OutputSpec:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    dimension = graph.sizes.batch_dimension(value)
    if dimension is not None:
        kind = OutputKind.SAMPLES
    elif node not in fed:
        kind = OutputKind.SAME
    else:
        kind = OutputKind.MEAN if value.is_floating_point() or value.is_complex() else OutputKind.TOTAL
    times = outer.get(node, 1)
    if kind is OutputKind.SAMPLES and times is None:
        raise TraceError(
            f"Nothing tells which samples the rows of {path} {tuple(value.shape)} are of, at "
            f"{origin(node) or node.name}, where time and batch are one dimension. Expected "
            "an output that has them apart; reshape it after the call."
        )
    return OutputSpec(node.name, path, kind, dimension or 0, graph.facts[node.name].needs_gradient, times)


_aten = torch.ops.aten
_RESHAPES = (
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.flatten.using_ints,
    _aten.unflatten.int,
)


def _outer_lengths(graph: fx.Graph, sizes: Sizes) -> dict[fx.Node, Any]:
    """Returns, for values of samples, how often these come one after the other in their dimension; None: not known."""
    found: dict[fx.Node, Any] = {}
    lengths: dict[fx.Node, Any] = {}
    for node in graph.nodes if sizes.symbol is not None else ():
        shape, dimension = _shape(node, sizes)
        if dimension is None:
            continue
        lengths[node] = length = shape[dimension]
        sources = [each for each in node.all_input_nodes if each in found]
        alike = [found[each] for each in sources if lengths[each] == length]
        if length == sizes.symbol:
            found[node] = sympy.Integer(1)
        elif node.target in _RESHAPES and node.args[0] in found:
            found[node] = _reshaped(found[node.args[0]], _shape(node.args[0], sizes), (shape, dimension))
        elif alike:
            found[node] = next((each for each in alike if each != 1), alike[0])
        else:
            found[node] = None if any(found[each] != 1 for each in sources) else sympy.Integer(1)
    return found


def _shape(node: Any, sizes: Sizes) -> tuple[list[Any], int | None]:
    """Returns the lengths of a value as expressions, and its batch dimension."""
    known, free = tensors_in(node.meta.get("val")), tensors_in(free_value(node))
    for value, lengths in zip(known, free, strict=True):
        dimension = sizes.batch_dimension(value)
        if dimension is not None:
            sizes_ = [
                each.node.expr if isinstance(each, torch.SymInt) else sympy.Integer(each) for each in lengths.shape
            ]
            return sizes_, dimension
    return [], None


def _reshaped(outer: Any, given: tuple[list[Any], int | None], made: tuple[list[Any], int | None]) -> Any:
    """Returns how often the samples come one after the other in a value that is another of another shape."""
    if outer is None:
        return None
    before, after = (prod(shape[:dimension], start=sympy.Integer(1)) for shape, dimension in (given, made))
    times = sympy.cancel(before * outer / after)
    return times if times.is_integer else None


def _fed_by_batch(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that depend on an input."""
    fed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(source in fed for source in node.all_input_nodes):
            fed.add(node)
    return fed


def _find_loss(specs: Sequence[OutputSpec], facts: dict[str, Fact]) -> int | None:
    scalars = [index for index, spec in enumerate(specs) if spec.needs_gradient and facts[spec.node].value.dim() == 0]
    named = [index for index in scalars if specs[index].path.endswith(("['loss']", ".loss"))]
    if len(named) == 1:
        return named[0]
    others = [spec for index, spec in enumerate(specs) if spec.needs_gradient and index not in scalars]
    return scalars[0] if len(scalars) == 1 and not others else None
