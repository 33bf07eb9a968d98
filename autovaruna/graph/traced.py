"""Defines `TracedModel`, a model as a graph that can be cut, and its outputs: a loss, samples, numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import chain, zip_longest
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna.errors import InputError, TraceError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.facts import KnownGraph
from autovaruna.graph.guards import entries, is_constant
from autovaruna.graph.opaque.run import OpaqueModule, opaque_module_of
from autovaruna.graph.operators import (
    SCALING,
    Linearity,
    Merge,
    ScalingUse,
    Trait,
    arguments,
    has,
    is_differentiable,
    name_of,
    operator_of,
    reached,
)
from autovaruna.graph.precision import precision_of
from autovaruna.graph.records import Graph
from autovaruna.graph.source_lines import origin

_LAYERS = frozenset(
    {
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
        *("layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm", "prelu", "bilinear"),
    }
)
_ADD_SELF = frozenset({"addmm", "baddbmm"})


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
        is_kept: whether it is of a key-value cache, and stays on the stage that made it.
        merge: how integers and truths of micro-batches become that of the batch.
    """

    node: str
    path: str
    kind: OutputKind
    dimension: int
    needs_gradient: bool
    outer: Any = 1
    is_kept: bool = False
    merge: Merge = Merge.SUM


@dataclass(frozen=True)
class BatchTotals:
    """The values of a graph that are of the whole batch; names are those of nodes.

    Attributes:
        merges: the totals, and how each is merged.
        after: what is computed from them, and from nothing else of the batch.
        values: the calls of `of_batch`: the node whose value each stands for, and what becomes of it.
    """

    merges: dict[str, Merge]
    before: tuple[str, ...]
    after: tuple[str, ...]
    values: dict[str, tuple[str, ScalingUse]]

    def __bool__(self) -> bool:
        return bool(self.values)


NO_TOTALS = BatchTotals({}, (), (), {})


def joined(parts: Sequence[Tensor], dimension: int, outer: int) -> Tensor:
    """Returns an output of all samples, of those that micro-batches made, with their order of dimensions in memory."""
    first = parts[0]
    if outer == 1 and not first.is_contiguous():  # what is averaged in another order differs in its last bit
        shape, order = list(first.shape), sorted(range(first.dim()), key=first.stride, reverse=True)
        shape[dimension] = sum(each.shape[dimension] for each in parts)
        whole = torch.empty_permuted(shape, order, dtype=first.dtype, device=first.device)
        return torch.cat(list(parts), dimension, out=whole)
    if outer == 1:
        return torch.cat(list(parts), dimension)
    return torch.cat([opened(each, dimension, outer) for each in parts], dimension + 1).flatten(
        dimension, dimension + 1
    )


def opened(tensor: Tensor, dimension: int, outer: int) -> Tensor:
    """Returns a tensor whose `dimension` is two, of which the second has the samples."""
    before, after = tensor.shape[:dimension], tensor.shape[dimension + 1 :]
    return tensor.reshape(*before, outer, tensor.shape[dimension] // outer, *after)


def classify(graph: KnownGraph, loss_mode: str, outer_of: Callable[[fx.Node], Any]) -> tuple[OutputSpec, ...]:
    """Classifies the outputs of a graph; `loss_mode` is ``loss`` (it has one), ``outputs`` (it has none) or ``auto``.

    Of an output of samples `outer_of` tells `OutputSpec.outer`; None: nobody knows.

    Raises:
        TraceError: ``loss`` is asked for and no single output can be it.
    """
    nodes: list[fx.Node] = list(graph.module.graph.output_node().args[0])  # type: ignore[arg-type]
    given = graph.module.graph.find_nodes(op="placeholder")
    fed, by_batch = (
        set(reached(sources, lambda node: node.users))
        for sources in (given, [node for node in given if node.name in graph.batch_inputs])
    )
    pairs = zip(nodes, graph.output_tree.tensor_paths(), strict=True)
    specs = [
        _classify_one(node, path, graph, fed if is_differentiable(node.meta["val"]) else by_batch, outer_of)
        for node, path in pairs
    ]
    place = None if loss_mode == "outputs" else _find_loss(specs, graph, is_asked=loss_mode == "loss")
    if place is None and loss_mode == "loss":
        found = {spec.path: spec.kind.value for spec in specs}
        raise TraceError(
            f"loss_mode='loss' needs one differentiable scalar among the outputs: got {found}. Return one, or the loss "
            "under the key 'loss', or pass loss_mode='outputs'."
        )
    if place is not None:
        loss = specs[place]
        specs[place] = OutputSpec(loss.node, loss.path, OutputKind.LOSS, 0, True)
    return tuple(specs)


def _classify_one(
    node: fx.Node, path: str, graph: KnownGraph, fed: set[fx.Node], outer_of: Callable[[fx.Node], Any]
) -> OutputSpec:
    """Classifies an output; `fed` are the nodes that may have other numbers in each micro-batch."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    dimension = graph.sizes.batch_dimension(value)
    if dimension is not None:
        kind = OutputKind.SAMPLES
    elif node not in fed:
        kind = OutputKind.SAME
    else:
        kind = OutputKind.MEAN if is_differentiable(value) else OutputKind.TOTAL
    times = outer_of(node) if kind is OutputKind.SAMPLES and graph.sizes.symbol is not None else 1
    if times is None:
        raise TraceError(
            f"Nothing tells which samples the rows of {path} {tuple(value.shape)} are of, at "
            f"{origin(node) or node.name}, where time and batch are one dimension. Expected "
            "an output that has them apart; reshape it after the call."
        )
    is_kept = path in graph.output_tree.cache_paths
    merge = _merge_of(node, graph) if kind is OutputKind.TOTAL else Merge.SUM
    needs_gradient = graph.facts[node.name].needs_gradient
    return OutputSpec(node.name, path, kind, dimension or 0, needs_gradient, times, is_kept, merge)


def _merge_of(node: fx.Node, graph: KnownGraph) -> Merge:
    """Returns how a number that is no mean becomes that of the batch: some are the greatest or least of it."""
    is_not = False
    while node.args and isinstance(node.args[0], fx.Node) and (_passes(node) or _is_not(node)):
        is_not ^= _is_not(node)
        node = node.args[0]
    merge, source = operator_of(node).merge, node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not graph.sizes.has_samples(source):
        return Merge.SUM
    turned = {Merge.LARGEST: Merge.SMALLEST, Merge.SMALLEST: Merge.LARGEST}
    return (turned[merge] if is_not else merge) if merge in turned else Merge.SUM


def _passes(node: fx.Node) -> bool:
    return has(node, Trait.SAME_NUMBER) or node.target is getitem


def _is_not(node: fx.Node) -> bool:
    return name_of(node) in ("logical_not", "bitwise_not") and node.meta["val"].dtype is torch.bool


def _find_loss(specs: Sequence[OutputSpec], graph: KnownGraph, *, is_asked: bool) -> int | None:
    """Returns the place of the output named loss, or else of the only differentiable scalar; None: it is none.

    Beside other outputs that need a gradient, a scalar may be one term of the script's loss. It is the loss itself if
    that `is_asked` for, or if it alone is made of some of the inputs, which then are labels.
    """
    nodes: list[fx.Node] = list(graph.module.graph.output_node().args[0])  # type: ignore[arg-type]
    trained = [index for index, spec in enumerate(specs) if spec.needs_gradient]
    scalars = [index for index in trained if graph.facts[specs[index].node].value.dim() == 0]
    named = [index for index in scalars if specs[index].path.endswith(("['loss']", ".loss"))]
    if len(named) == 1 or len(scalars) != 1:
        return named[0] if len(named) == 1 else None
    others = [_inputs_of(nodes[index]) for index in trained if index != scalars[0]]
    labels = graph.batch_inputs & _inputs_of(nodes[scalars[0]]).difference(*others)
    return scalars[0] if is_asked or labels or not others else None


def _inputs_of(node: fx.Node) -> set[str]:
    """Returns the names of the inputs that a value is made of."""
    return {each.name for each in reached([node], lambda source: source.all_input_nodes) if each.op == "placeholder"}


def _multiplied(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments of an operation but those that it adds."""
    is_sum = name_of(node) in _ADD_SELF
    given = arguments(node).items()
    return [
        each for name, each in given if isinstance(each, fx.Node) and name != "bias" and not (is_sum and name == "self")
    ]


@dataclass(frozen=True)
class Threshold:
    """A node that makes something else of a count above a number; or, without `rows`, of places in the batch.

    Attributes:
        number: by the size of the batch, or not; NaN: it is not known.
        rows: how many elements of a sample may count.
        meets_samples: whether something with a row for each sample is made of it.
    """

    node: str
    number: Any = 0.0
    rows: int = 0
    meets_samples: bool = True


@dataclass(frozen=True, kw_only=True)
class TracedModel(KnownGraph):
    """A model as a graph that can be cut.

    Attributes:
        repeated: nodes that run in every stage that uses them, each with all that are repeated together.
        changed_state: first names of buffers, and of parameters, that forward changes.
        steady_state: those of them that it changes whatever the samples are.
        joins_counts: nodes that join counts of several samples.
        thresholds: what may be other in a batch of more samples.
    """

    graph: Graph
    repeated: Mapping[str, tuple[str, ...]]
    outputs: tuple[OutputSpec, ...]
    changed_state: frozenset[str]
    steady_state: frozenset[str] = frozenset()
    totals: BatchTotals = NO_TOTALS
    joins_counts: tuple[str, ...] = ()
    thresholds: tuple[Threshold, ...] = ()

    @cached_property
    def key(self) -> str:
        """Digest of the calls that this graph serves."""
        return self.call.key if self.sizes.symbol is not None else f"{self.call.key}/{self.sizes.batch_size}"

    def lengths_of(self, call: CallSpec) -> tuple[int, ...] | None:
        """Returns the lengths that vary, as they are in a call; None: the graph does not serve it."""
        if self.call.kind != call.kind or self.call.mode != call.mode:
            return None
        if self.sizes.lengths is not None:
            return self.sizes.lengths.of(call)
        return () if self.call.key == call.key else None

    def check_layouts(self, tensors: Sequence[Tensor]) -> None:
        """Refuses inputs that lie in memory in another way than those of the trace, where forward asks for that."""
        for spec, tensor in zip(self.call.inputs, tensors, strict=True):
            if self.asks_for_layout and not (spec.dimension or tensor.is_contiguous()):
                raise InputError(
                    f"forward asks how a tensor lies in memory{self.asks_for_layout}, and a trace goes by contiguous "
                    f"inputs: got {spec.name} {spec.passed_shape} with the strides {tensor.stride()}. Expected "
                    f"{spec.name}.contiguous()."
                )

    def backward_constants(self) -> dict[str, Any]:
        """Returns numbers and texts, by name, that backwards of autograd functions now read from outside of them."""
        if not self.kept:
            return {}
        places = chain(*(each.backward_places for each in self.kept))
        found = (each for place in places for each in entries(place.path, place.values()))
        return {name: value for name, value in found if is_constant(value)}

    @cached_property
    def kept(self) -> list[OpaqueModule]:
        """What is kept whole, once for each use: its code runs as it is in each step, and may change its state."""
        return [kept for node in self.module.graph.nodes if (kept := opaque_module_of(node)) is not None]

    def outer(self, spec: OutputSpec, lengths: tuple[int, ...]) -> int:
        """Returns how often all samples come one after the other in an output's dimension, in a call of `lengths`."""
        return 1 if spec.outer == 1 else int(self.sizes.in_call(spec.outer, 1, lengths))

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.module.graph.nodes}

    @property
    def code(self) -> str:
        """The code of the graph, whatever its nodes are called: names count nodes that are gone."""
        nodes = self.module.graph.nodes
        names = {node.name: f"node{place}" for place, node in enumerate(nodes)}
        code = self.module.graph.python_code("self").src
        return re.sub(r"(?<![.\w])[A-Za-z_]\w*", lambda name: names.get(name[0], name[0]), code)

    @cached_property
    def needs_gradient(self) -> bool:
        return any(spec.needs_gradient for spec in self.outputs)

    @cached_property
    def casts(self) -> bool:
        """Whether an operation runs under autocast."""
        return any(map(precision_of, self.module.graph.nodes))

    @cached_property
    def has_kept_modules(self) -> bool:
        """Whether submodules with parameters are kept whole: which of them they use may vary."""
        return any(each.num_parameters for each in self.kept)

    @cached_property
    def saved_weights(self) -> frozenset[str]:
        """First names of the parameters whose numbers a backward needs, if they are trained, and that forward leaves.

        What autocast casts is saved as a copy, and does not count; nor do operations of which nobody knows.
        """
        found, facts = set[str](), self.facts
        weights: dict[fx.Node, str] = {}
        for node in self.module.graph.nodes:
            seen = [weights[each] for each in node.all_input_nodes if each in weights]
            if node.op == "get_attr" and str(node.target) in self.parameters:
                weights[node] = self.parameters[str(node.target)]
            elif seen and node.op == "call_function" and facts[node.name].is_view:
                weights[node] = seen[0]
            is_saved = name_of(node) in _LAYERS or operator_of(node).linearity in SCALING | {Linearity.PRODUCT}
            if is_saved and not precision_of(node):
                multiplied = [each for each in _multiplied(node) if facts[each.name].needs_gradient]
                if len(multiplied) > 1:
                    found |= {weights[each] for each in multiplied if each in weights}
        return frozenset(found) - self.changed_state

    @cached_property
    def places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.nodes)}

    @cached_property
    def changed_storages(self) -> frozenset[int]:
        """Storages of parameters and buffers that forward changes."""
        attributes = self.module.graph.find_nodes(op="get_attr")
        state = {storage for node in attributes for storage in self.facts[node.name].makes}
        return frozenset(state & {storage for fact in self.facts.values() for storage in fact.writes})

    @cached_property
    def block_of(self) -> dict[str, int]:
        return {name: block.index for block in self.graph.blocks for name in block.nodes}

    @cached_property
    def loss(self) -> OutputSpec | None:
        """The output that a step differentiates; None: the model returns other outputs."""
        return next((spec for spec in self.outputs if spec.kind is OutputKind.LOSS), None)


def is_same_graph(one: TracedModel, other: TracedModel) -> bool:
    """Whether two traces of a model compute the same, numbers and all."""
    if one.graph.cut_marks != other.graph.cut_marks or one.output_tree.key() != other.output_tree.key():
        return False
    if one.constants.keys() != other.constants.keys() or one.code != other.code:
        return False
    return all(torch.equal(tensor, other.constants[name]) for name, tensor in one.constants.items())


def difference(one: TracedModel, other: TracedModel) -> str:
    """Says where two traces of a model, which are not the same, differ first, and how."""
    nodes = list(other.module.graph.nodes)
    for old, new in zip_longest(one.code.splitlines(), other.code.splitlines(), fillvalue="nothing"):
        if old != new:
            place = re.match(r"\s*node(\d+) =", new)
            line = origin(nodes[int(place[1])]) if place else ""
            return f"got {new.partition(';')[0].strip()}, traced as {old.partition(';')[0].strip()}, at {line or '?'}"
    return "got other structures, or other numbers in its constants"
