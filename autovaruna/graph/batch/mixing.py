"""Refuses graphs in which the samples of a batch meet, for which micro-batches would silently give other numbers.

A shape with the batch in two dimensions says so at once. What else joins samples is found by how far each value reaches
over the batch: a number that was reduced over it (or is one sample's) may end in the loss, but must not come back to
the samples, nor into layers; and no operation may run along the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem
from typing import Any

from torch import Tensor, fx, nn

from autovaruna._torch import OpOverload
from autovaruna.errors import TraceError
from autovaruna.graph.advice import advice
from autovaruna.graph.batch.drawn import are_in_turn, follows_place
from autovaruna.graph.batch.interpret import Values, has_numbers, is_long, read
from autovaruna.graph.batch.operators import MEAN, Trait, arguments, has, name_of, operator_of
from autovaruna.graph.batch.values import Reach, reached
from autovaruna.graph.call import CallSpec
from autovaruna.graph.facts import Fact, tensors_in
from autovaruna.graph.opaque.infer_reduction import opaque_name, reduction_of
from autovaruna.graph.opaque.run import Reduction
from autovaruna.graph.sizes import Sizes
from autovaruna.graph.source_lines import modules_of, origin


def refuse_mixing(
    model: nn.Module, call: CallSpec, graph: fx.Graph, facts: Mapping[str, Fact], sizes: Sizes, batch: frozenset[str]
) -> list[fx.Node]:
    """Makes sure that the numbers of samples go through a graph one by one; returns what joins counts of several.

    Args:
        model: The model.
        call: The call that was traced.
        graph: The traced graph.
        facts: What is known of each node.
        sizes: Its sizes; those of one fixed batch size are not looked at.
        batch: Names of the inputs whose first dimension is the batch.

    Raises:
        TraceError: an operation mixes samples; says which, and how to go on.
    """
    if sizes.symbol is None:
        return []
    meetings = _Meetings(Values(graph, facts, sizes, batch), facts, sizes)
    for node in graph.nodes:
        if words := meetings.words(node):
            name, place = type(model).__qualname__, origin(node) or node.name
            helps = advice(model, call, modules_of(node))
            raise TraceError(f"{name} mixes the samples of a batch: {words} at {place}. {helps}")
    return [node for node in graph.nodes if meetings.joins_counts(node)]


class _Meetings:
    """Tells how the operations of a graph have samples meet."""

    def __init__(self, values: Values, facts: Mapping[str, Fact], sizes: Sizes) -> None:
        self._values = values
        self._facts = facts
        self._sizes = sizes

    def joins_counts(self, node: fx.Node) -> bool:
        """Whether what was counted over the batch meets samples, or an operation along the batch makes counts."""
        if is_long(node) and any(self._reach(each) is Reach.COUNTS_OF_SEVERAL for each in read(node)):
            return True
        is_count = Reach.NONE < self._reach(node) < Reach.SAMPLES
        return is_count and isinstance(node.target, OpOverload) and self._runs_along(node, is_count)

    def words(self, node: fx.Node) -> str:
        """Returns how a node mixes samples; empty if it does not."""
        if not isinstance(node.target, OpOverload):
            return self._inside(node)
        value = node.meta.get("val")
        if isinstance(value, Tensor) and self._sizes.mixes_samples(value):
            return f"the value {node.name} has the shape {tuple(value.shape)}"
        if words := self._by_place(node) or _in_bags(node) or self._by_count(node):
            return words
        if self._reach(node) < Reach.SAMPLES:
            return ""
        if words := self._brought_back(node):
            return words
        if self._runs_along(node):
            return f"{node.name} runs along the batch"
        return self._cut(node)

    def _reach(self, node: fx.Node) -> Reach:
        return self._values[node].reach

    def _runs_along(self, node: fx.Node, is_count: bool = False) -> bool:
        """Whether the operation of a node goes from sample to sample."""
        row = operator_of(node)
        if Trait.BY_INDEX in row.traits:
            pairs = _picked(node)
            return any(
                not are_in_turn(each, length, self._sizes) for each, length in pairs if self._sizes.grows(length)
            )
        lengths = (is_count and row.counts_along) or row.along
        return lengths is not None and any(map(self._sizes.grows, lengths(node)))

    def _brought_back(self, node: fx.Node) -> str:
        """Finds what was made of all samples and meets each of them, or a layer, again."""
        made_of_all = [each for each in read(node) if self._reach(each) is Reach.ALL]
        if not made_of_all:
            return ""
        what = f"{made_of_all[0].name}, which is made of several samples,"
        if self._reach(node) is Reach.SAMPLES:
            return f"{what} meets each sample in {node.name}"
        if has(node, Trait.LAYER) and any(map(self._is_weight, node.all_input_nodes)):
            return f"{what} goes through the layer {node.name}"
        return ""

    def _is_weight(self, node: fx.Node) -> bool:
        return self._reach(node) is Reach.NONE and self._facts[node.name].needs_gradient

    def _by_place(self, node: fx.Node) -> str:
        """Finds numbers for samples that follow from their places in the batch, and are computed with."""
        is_of_samples = self._reach(node) is Reach.SAMPLES
        if has(node, Trait.TAKES_ROWS) is is_of_samples or not any(map(has_numbers, _tensors(node))):
            return ""
        for source in read(node):
            is_of_sizes = self._reach(source) is Reach.NONE and self._sizes.has_samples(source)
            if is_of_sizes and follows_place(source, self._sizes):
                return f"{source.name}, which counts the samples, is computed with in {node.name}"
        return ""

    def _by_count(self, node: fx.Node) -> str:
        """Finds backwards of means in forward, and gradients divided by how often an index is there."""
        if name_of(node).endswith("_backward") and arguments(node).get("reduction") == MEAN:
            return f"the gradient of a mean over the samples, for each of them (use a sum), is {node.name}"
        if not arguments(node).get("scale_grad_by_freq") or not self._facts[node.name].needs_gradient:
            return ""
        return f"scale_grad_by_freq has gradients go by how often an index is in the batch, in {node.name}"

    def _cut(self, node: fx.Node) -> str:
        """Finds other than whole batches: all but the first sample, one half of them, or some rows more."""
        for tensor in _tensors(node):
            if any(map(self._sizes.is_part, tensor.shape)):
                return f"{node.name}, of the shape {tuple(tensor.shape)}, leaves samples out or adds some"
        return ""

    def _inside(self, node: fx.Node) -> str:
        """Finds modules and functions that are kept whole, and make something else of the parts of a batch."""
        if node.target is not getitem or reduction_of(node) is not Reduction.OTHER:
            return ""
        what = f"what {opaque_name(node)}, which is kept whole, returns"
        if self._reach(node) is Reach.NONE:
            return f"the gradient of {what} for the whole batch is no sum of those for its samples"
        return f"{what} for a sample, or its gradient, depends on others," if is_long(node) else ""


def _tensors(node: fx.Node) -> list[Tensor]:
    return tensors_in(node.meta.get("val"))


def _picked(node: fx.Node) -> list[tuple[fx.Node, Any]]:
    """Returns the numbers by which a node picks, each with the length of the dimension."""
    given = arguments(node)
    indices = given.get("indices", given.get("index"))
    pairs = enumerate(indices) if isinstance(indices, list | tuple) else [(given["dim"], indices)]
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return [(index, shape[dim]) for dim, index in pairs if isinstance(index, fx.Node)]


def _in_bags(node: fx.Node) -> str:
    """Says how bags of embeddings begin at places among the indices of the whole batch; empty if they do not."""
    if not has(node, Trait.IN_BAGS):
        return ""
    begin: Any = node.args[2]
    for each in reached([begin], _tensor_sources):
        if each.op == "placeholder":
            return (
                f"{each.name} says where bags begin among the indices of the whole batch (pass indices of the shape "
                f"(batch, most in a bag), filled up with padding_idx, and no offsets) in {node.name}"
            )
    return ""


def _tensor_sources(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
