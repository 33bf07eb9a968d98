"""Refuses graphs in which samples meet, and losses of micro-batches that do not make up that of the batch.

A number that was reduced over the batch (or is one sample's) may end in the loss, but must not come back to samples,
nor into layers; and no operation may run along the batch. From the loss back, operations on numbers that are made of
several samples must keep means: a root of a mean, or a product of two, is another for micro-batches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import OpOverload
from autovaruna.errors import InputError, TraceError
from autovaruna.graph.batch.interpret import BatchAnalysis, is_long, read
from autovaruna.graph.batch.order import SampleOrders
from autovaruna.graph.batch.powers import Powers
from autovaruna.graph.export.errors import advice
from autovaruna.graph.facts import KnownGraph, tensors_in
from autovaruna.graph.opaque.run import opaque_module_of
from autovaruna.graph.operators import (
    BY_SAMPLES,
    KEEPING,
    MEAN,
    SCALING,
    Dependence,
    Linearity,
    Merge,
    Trait,
    ValueSource,
    adds_up,
    arguments,
    has,
    is_differentiable,
    is_listed,
    name_of,
    operator_of,
    reached,
)
from autovaruna.graph.source_lines import modules_of, origin
from autovaruna.graph.traced import OutputKind, TracedModel

logger = logging.getLogger(__name__)


def refuse_mixing(model: nn.Module, graph: KnownGraph, orders: SampleOrders) -> list[fx.Node]:
    """Makes sure that the numbers of samples go through a graph one by one; returns what joins counts of several.

    One that holds for one batch size alone is not looked at. Raises TraceError for an operation that mixes samples.
    """
    if graph.sizes.symbol is None:
        return []
    meetings = _Meetings(graph, orders)
    for node in graph.module.graph.nodes:
        if words := meetings.words(node):
            name, helps = type(model).__qualname__, advice(model, graph.call, modules_of(node))
            raise TraceError(f"{name} mixes the samples of a batch: {words} at {_place(node)}. {helps}")
    return [node for node in graph.module.graph.nodes if meetings.joins_counts(node)]


class _Meetings:
    """Tells how the operations of a graph have samples meet."""

    def __init__(self, graph: KnownGraph, orders: SampleOrders) -> None:
        self._orders, self._values, self._facts, self._sizes = orders, orders.values, graph.facts, graph.sizes

    def joins_counts(self, node: fx.Node) -> bool:
        """Whether what was counted over the batch meets samples, or an operation along the batch makes counts."""
        if is_long(node) and any(self._dependence(each) is Dependence.COUNTS_OF_SEVERAL for each in read(node)):
            return True
        is_count = Dependence.NONE < self._dependence(node) < Dependence.SAMPLES
        return is_count and isinstance(node.target, OpOverload) and self._runs_along(node, is_count)

    def words(self, node: fx.Node) -> str:
        """Returns how a node mixes samples; empty if it does not."""
        if node in self._orders.torn and (
            self._dependence(node) >= Dependence.SAMPLES or not has(node, Trait.BY_INDEX)
        ):
            return self._orders.torn[node]
        if not isinstance(node.target, OpOverload):
            return ""
        value = node.meta.get("val")
        if isinstance(value, Tensor) and sum(map(self._sizes.grows, value.shape)) > 1:  # samples meet each other in it
            return f"the value {node.name} has the shape {tuple(value.shape)}"
        if words := self._by_place(node) or _in_bags(node) or self._by_count(node):
            return words
        if self._dependence(node) > Dependence.NONE and (words := self._brought_back(node)):
            return words
        if self._dependence(node) < Dependence.SAMPLES:
            return ""
        if self._runs_along(node):
            return f"{node.name} runs along the batch"
        return self._cut(node)

    def _dependence(self, node: fx.Node) -> Dependence:
        return self._values[node].dependence

    def _runs_along(self, node: fx.Node, is_count: bool = False) -> bool:
        """Whether the operation of a node goes from sample to sample."""
        row = operator_of(node)
        if Trait.BY_INDEX in row.traits:
            return node in self._orders.torn
        lengths = (is_count and row.counts_along) or row.along
        return lengths is not None and any(map(self._sizes.grows, lengths(node)))

    def _brought_back(self, node: fx.Node) -> str:
        """Finds what was made of all samples and meets each of them, or a layer, again; a count does as a number."""
        joint, is_trained = {Dependence.ALL}, self._facts[node.name].needs_gradient
        if is_trained and operator_of(node).linearity in SCALING | {Linearity.LINEAR} and not has(node, Trait.BY_INDEX):
            joint.add(Dependence.COUNTS_OF_SEVERAL)
        made_of_all = [each for each in read(node) if self._dependence(each) in joint]
        if not made_of_all:
            return ""
        what = f"{made_of_all[0].name}, which is made of several samples,"
        if self._dependence(node) is Dependence.SAMPLES or is_long(node):  # or makes a mask of them
            return f"{what} meets each sample in {node.name}"
        others = [each for each in node.all_input_nodes if self._dependence(each) is Dependence.NONE]
        if has(node, Trait.LAYER) and any(self._facts[each.name].needs_gradient for each in others):
            return f"{what} goes through the layer {node.name}"
        return ""

    def _by_place(self, node: fx.Node) -> str:
        """Finds numbers for samples that follow from their places in the batch, and are computed with."""
        most = max((self._dependence(each) for each in read(node)), default=Dependence.NONE)
        if has(node, Trait.BY_INDEX) is (most >= Dependence.SAMPLES) or not any(
            map(is_differentiable, _tensors_of(node))
        ):
            return ""
        for source in read(node):
            is_of_sizes = self._dependence(source) is Dependence.NONE and self._sizes.has_samples(source)
            if is_of_sizes and not self._orders.fits(source, node) and not self._is_drawn(source):
                return (
                    f"{source.name}, whose rows follow from their places in the batch, is computed with in {node.name}"
                )
        return ""

    def _is_drawn(self, value: fx.Node) -> bool:
        """Whether chance makes the rows of a value, whatever their places: all but the order of a permutation."""
        made_of = reached([value], lambda node: node.all_input_nodes)
        return any(self._facts[node.name].is_random and name_of(node) != "randperm" for node in made_of)

    def _by_count(self, node: fx.Node) -> str:
        """Finds gradients that are divided by how often an index is there."""
        if not arguments(node).get("scale_grad_by_freq") or not self._facts[node.name].needs_gradient:
            return ""
        return f"scale_grad_by_freq has gradients go by how often an index is in the batch, in {node.name}"

    def _cut(self, node: fx.Node) -> str:
        """Finds other than whole batches: all but the first sample, one half of them, or some rows more."""
        for tensor in _tensors_of(node):
            if any(map(self._sizes.is_part, tensor.shape)):
                return f"{node.name}, of the shape {tuple(tensor.shape)}, leaves samples out or adds some"
        return ""


def _tensors_of(node: fx.Node) -> list[Tensor]:
    return tensors_in(node.meta.get("val"))


def _in_bags(node: fx.Node) -> str:
    """Says how bags of embeddings begin at places among the indices of the whole batch; empty if they do not."""
    if not has(node, Trait.IN_BAGS):
        return ""
    begin: Any = node.args[2]
    for each in reached([begin], lambda node: filter(_tensors_of, node.all_input_nodes)):
        if each.op == "placeholder":
            return (
                f"{each.name} says where bags begin among the indices of the whole batch (pass indices of the shape "
                f"(batch, most in a bag), filled up with padding_idx, and no offsets) in {node.name}"
            )
    return ""


def refuse_other_losses(traced: TracedModel, is_added: bool, is_exact: bool = True) -> None:
    """Makes sure that losses of micro-batches make up that of the batch; warns of other outputs that do not.

    Losses are averaged, or added up if that `is_added`. If it is not `is_exact`, a loss may go on from means as well,
    each micro-batch from its own. Others are an InputError.
    """
    values = BatchAnalysis(traced)
    means, powers = _LossTail(traced, values), Powers(values, traced.sizes, is_added)
    _warn_of_other_counts(traced)
    specs = [spec for spec in traced.outputs if spec.kind in (OutputKind.LOSS, OutputKind.MEAN)]
    for spec in specs if traced.sizes.symbol is not None else ():
        node = traced.nodes[spec.node]
        is_free = spec.kind is OutputKind.LOSS and not is_exact
        found = (None if is_free else means.broken_in(node)) or powers.no_mean_in(node)
        if found is not None and spec.kind is OutputKind.LOSS:
            raise InputError(
                f"The loss of the model is no mean over its samples: {found.name}, at {_place(found)}, goes on "
                "from numbers that are made of several samples, or makes them in another way than by adding up, but "
                "losses of micro-batches are averaged. Pass num_micro_batches=1, with inputs='replicated' on several "
                "ranks; or return what it is computed from, and compute it outside of the model, from the outputs of "
                "the whole batch; or pass dynamic_batch=False: each micro-batch is then a batch of its own to the "
                "model. For the load balance of a mixture of experts pass batch_statistics='micro-batch', which takes "
                "such a loss of each micro-batch and averages it, as its trainers do."
            )
        kept = None if spec.needs_gradient else means.kept_in(node)  # else the first step tells
        if (told := found or kept) is not None:
            logger.warning(
                "%s %s no mean over the samples (%s): got the mean of what micro-batches give. Compute it outside of "
                "the model to have that of the whole batch.",
                *(spec.path, "may be" if found is None else "is", _place(told)),
            )
    for spec in specs:
        node = traced.nodes[spec.node]
        made = powers.no_sum_in(node) if is_added else powers.sum_in(node)
        if made is None:
            continue
        if spec.kind is not OutputKind.LOSS:
            given, other = ("no sum", "sum") if is_added else ("a sum", "mean")
            logger.warning(
                "%s is %s over the samples (%s): got the %s of what micro-batches give. Expected a %s, or the setting "
                "reduction=%r.",
                *(spec.path, given, _place(made), other, other, "mean" if is_added else "sum"),
            )
        elif is_added:
            raise InputError(
                f"The loss of the model is no sum over the samples: {made.name}, at {_place(made)}, does not grow with "
                "them, but losses of micro-batches are added up: got reduction='sum'. Expected a sum, in which terms "
                "of weights alone count once a sample (multiply them by len(x)); or the setting reduction='mean', for "
                "a mean."
            )
        else:
            raise InputError(
                f"The loss of the model is a sum over the samples, made by {made.name} at {_place(made)}, but losses "
                "of micro-batches are averaged: got reduction='mean'. Expected a mean, or the setting reduction='sum', "
                "which adds the micro-batches of all ranks up; micro_batch_weight gives each a weight of its own."
            )


def _warn_of_other_counts(traced: TracedModel) -> None:
    """Warns of integers and truths that are neither a count over the samples nor their greatest or least."""
    for spec in traced.outputs if traced.sizes.symbol is not None else ():
        node = traced.nodes[spec.node]
        if spec.kind is OutputKind.TOTAL and spec.merge is Merge.SUM and not _is_count(node, traced):
            logger.warning(
                "%s is no count over the samples (%s): got the %s what micro-batches give. Return what it is made of, "
                "and compute it outside of the model to have that of the whole batch.",
                *(spec.path, _place(node), "truth of any of" if node.meta["val"].dtype is torch.bool else "sum of"),
            )


def _is_count(node: Any, traced: TracedModel) -> bool:
    """Whether numbers of micro-batches add up to that of the batch: sizes and sums of samples, scaled and added up."""
    if not isinstance(node, fx.Node) or traced.sizes.is_given(node):
        return isinstance(node, fx.Node)
    if any(map(traced.sizes.has_samples, node.all_input_nodes)) and not has(node, Trait.SAME_NUMBER):
        return adds_up(node) or name_of(node) in ("bincount", "histc")
    if operator_of(node).linearity is Linearity.MULTIPLY:
        return sum(_is_count(each, traced) for each in node.args[:2]) == 1
    is_linear = operator_of(node).linearity in KEEPING or has(node, Trait.SAME_NUMBER)
    sources = node.args[:2] if name_of(node) in ("add", "add_", "sub", "sub_", "rsub") else node.all_input_nodes
    return is_linear and bool(sources) and all(_is_count(each, traced) for each in sources)


def _place(made: fx.Node) -> str:
    return origin(made) or made.name


class _LossTail:
    """Follows a loss back to where samples were reduced."""

    def __init__(self, traced: TracedModel, values: BatchAnalysis) -> None:
        self._sizes = traced.sizes
        self._facts = traced.facts
        self._values = values

    def broken_in(self, loss: fx.Node) -> fx.Node | None:
        """Returns the first operation that makes something else of a mean; None: there is none."""

        def is_made(node: fx.Node) -> bool:
            return node.op == "call_function" and self._is_joint(node)

        joint = reached([loss], lambda node: node.all_input_nodes if is_made(node) else ())
        return min((node for node in joint if is_made(node) and self._breaks(node)), default=None)

    def kept_in(self, number: fx.Node) -> fx.Node | None:
        """Returns what a kept module has made of several samples, of which a number is made; None: there is none."""
        made_of = reached([number], lambda node: filter(self._is_joint, node.all_input_nodes))
        made: list[Any] = [node for node in made_of if node.target is getitem]
        return next((node for node in made if opaque_module_of(node.args[0]) is not None), None)

    def _breaks(self, node: fx.Node) -> bool:
        if node.target is getitem:
            made: Any = node.args[0]
            is_kept = opaque_module_of(made) is not None
            return any(map(self._is_joint, made.all_input_nodes)) if is_kept else self._breaks(made)
        if not isinstance(node.target, OpOverload):
            return False
        row = operator_of(node)
        if row.linearity is Linearity.BREAK:
            return True
        joint = [self._is_joint(source) for source in node.all_input_nodes]
        if row.linearity in (Linearity.MULTIPLY, Linearity.PRODUCT):
            return sum(joint) > 1 or (any(joint) and node.args[0] is node.args[1])
        if row.linearity is Linearity.DIVIDE:
            return sum(joint) > 1 or self._is_joint(node.args[1])
        if any(joint):
            return row.linearity is not Linearity.LINEAR and not self._facts[node.name].is_view
        if Trait.PICKS in row.traits or self._averages_counted(node):
            return True
        return not is_listed(node) and any(map(self._sizes.has_samples, node.all_input_nodes))

    def _averages_counted(self, node: fx.Node) -> bool:
        """Whether a node is a mean over as many numbers as numbers of the model say; counts of inputs are parted.

        Labels that do not count, or weigh more, are such.
        """
        given = arguments(node)
        if name_of(node) != "mean" and given.get("reduction") != MEAN:
            return False
        if any(map(self._sizes.depends_on_data, node.all_input_nodes)):
            return True
        if not has(node, Trait.AVERAGES_LABELS) or given["target"].meta["val"].is_floating_point():
            return False
        return given.get("weight") is not None or _may_hold(given["target"], given["ignore_index"])

    def _is_joint(self, node: Any) -> bool:
        """Whether a value is made of several samples: it depends on the batch, and has none."""
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor) or ValueSource.SAMPLES not in self._values[node].source:
            return False
        return not _says_what_is_finite(node) and not self._sizes.has_samples(node)


def _may_hold(labels: fx.Node, ignored: int) -> bool:
    """Whether integers that a model makes may be those of labels that do not count: it names that number somewhere."""

    def is_whole(node: fx.Node) -> bool:
        value = node.meta.get("val")
        return node.op == "call_function" and isinstance(value, Tensor) and not value.is_floating_point()

    nodes = reached([labels], lambda node: filter(is_whole, node.all_input_nodes))
    given = (argument for node in nodes for argument in (*node.args, *node.kwargs.values()))
    return any(argument == ignored for argument in given if isinstance(argument, int))


def _says_what_is_finite(node: fx.Node) -> bool:
    """Whether a mask says where numbers are finite: with sound numbers it is the same in every micro-batch."""
    if has(node, Trait.TELLS_FINITE):
        return True
    return has(node, Trait.JOINS_MASKS) and all(map(_says_what_is_finite, node.all_input_nodes))


def batch_norms(traced: TracedModel) -> list[fx.Node]:
    """Returns the batch normalisations that go by the statistics of their samples."""
    nodes = traced.module.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
    return [node for node in nodes if node.args[BY_SAMPLES]]


def refuse_single_values(traced: TracedModel, sizes: Iterable[int]) -> None:
    """Refuses micro-batches that leave a batch normalisation one value a channel: PyTorch's check is not traced."""
    smallest = min(sizes)
    for node in batch_norms(traced):
        given: Any = node.args[0]
        batch, channels, *others = traced.sizes.shape(given.meta["val"], smallest)
        if batch * math.prod(others) == 1:
            raise InputError(
                f"A micro-batch has {smallest} sample, which leaves {node.name} one value for each of {channels} "
                "channels; in training a batch normalisation needs more. Pass larger mini-batches, ask for fewer "
                "micro-batches, or leave out the last batch of an epoch (drop_last=True)."
            )
