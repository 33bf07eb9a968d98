"""Refuses graphs in which the samples of a batch meet, for which micro-batches would silently give other numbers.

A shape with the batch in two dimensions says so at once. What else joins samples is found by how far each value reaches
over the batch: a number that was reduced over it (or is one sample's) may end in the loss, but must not come back to
the samples, nor into layers; and no operation may run along the batch. Integers and masks end a reach, for experts and
lengths are counted over a batch without a sample's result depending on the others. So do parameters and buffers that
forward changes by the samples: like batch normalisation's, they change once a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna.errors import TraceError
from autovaruna.graph.arguments import MEAN, arguments
from autovaruna.graph.batch.along_batch import counts_along, in_bags, runs_along
from autovaruna.graph.batch.of_batch import is_of_batch
from autovaruna.graph.batch.places import TAKE_ROWS, follows_place
from autovaruna.graph.batch.reductions import name_of
from autovaruna.graph.facts import Fact, tensors_in
from autovaruna.graph.kept_whole.function_joins import join_of, name_of_kept
from autovaruna.graph.kept_whole.returned import Join
from autovaruna.graph.origin import origin
from autovaruna.graph.sizes import Sizes

aten = torch.ops.aten
_LAYERS = frozenset({aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, aten.bmm.default})
_SHAPE_ALONE = (
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty"),
)
_NOT_COMPUTED_WITH: Mapping[Any, int] = {
    **dict.fromkeys((aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), -1),
    **dict.fromkeys((aten.embedding_bag.default, aten.embedding_bag.padding_idx), 2),
}
"""Arguments of other kinds: what labels weigh in all, which counts in means alone (refused); where bags begin."""
_AS_ANOTHER = frozenset({aten.to.other, aten.type_as.default, aten.expand_as.default, aten.view_as.default})
"""Operations that take from their second argument its kind or shape alone."""


class Reach(IntEnum):
    """How far a value reaches over the batch."""

    NONE = 0
    """It does not depend on the batch."""
    COUNTS = 1
    """Integers or masks, or what was counted from them."""
    SAMPLES = 2
    """Numbers of the samples, each in a place of its own."""
    ALL = 3
    """Numbers of several samples in one, or of one for all."""


ADVICE = (
    "Expected a model that treats samples one by one, so that a batch can go through in micro-batches. Pass tensors "
    "whose first dimension is the batch (batch_first=True), move what mixes samples (a contrastive loss, say) out of "
    "the model, or pass num_micro_batches=1, with inputs='replicated' on several ranks; or dynamic_batch=False: each "
    "micro-batch is then a batch of its own to the model, and with num_micro_batches=the number of ranks so is what "
    "each rank passes (a graph of its own, say)."
)


def refuse_mixing(
    name: str, graph: fx.Graph, facts: Mapping[str, Fact], sizes: Sizes, batch: frozenset[str]
) -> list[fx.Node]:
    """Makes sure that the numbers of samples go through a graph one by one; returns what joins counts of several.

    Args:
        name: The model's name.
        graph: The traced graph.
        facts: What is known of each node.
        sizes: Its sizes; those of one fixed batch size are not looked at.
        batch: Names of the inputs whose first dimension is the batch.

    Raises:
        TraceError: an operation mixes samples; says which, and how to go on.
    """
    if sizes.symbol is None:
        return []
    reaches = _Reaches(facts, sizes, batch)
    for node, words in reaches.mixed(graph):
        raise TraceError(f"{name} mixes the samples of a batch: {words} at {origin(node) or node.name}. {ADVICE}")
    return reaches.joining


class _Reaches:
    """Follows reaches through a graph, in order of execution; `joining` has what joins counts of several samples."""

    def __init__(self, facts: Mapping[str, Fact], sizes: Sizes, batch: frozenset[str]) -> None:
        self._facts = facts
        self._sizes = sizes
        self._batch = batch
        self._known: dict[fx.Node, Reach] = {}
        self._of_several: set[fx.Node] = set()
        self.joining: list[fx.Node] = []
        self._state: set[int] = set()
        self._becomes_state: set[Any] = set()

    def mixed(self, graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
        """Yields the operations that mix samples, and how, in words."""
        self._state = {storage for node in graph.find_nodes(op="get_attr") for storage in self._made_by(node)}
        copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
        self._becomes_state = {self._source(node) for node in copies if self._facts[node.name].writes & self._state}
        for node in graph.nodes:
            self._known[node] = self._reach(node)
            words = self._words(node) if isinstance(node.target, torch._ops.OpOverload) else self._mixed_inside(node)
            if words:
                yield node, words
            self._note_joined(node)

    def _reach(self, node: fx.Node) -> Reach:
        if node.op == "placeholder":
            return self._of_numbers(node, Reach.SAMPLES if node.name in self._batch else Reach.NONE)
        fact = self._facts.get(node.name)
        if node.op != "call_function" or fact is None or self._is_state(node, fact):
            return Reach.NONE
        if _is_shape_alone(node) or is_of_batch(node):
            return Reach.NONE
        most = max((self._known[each] for each in _read(node)), default=Reach.NONE)
        if most is Reach.COUNTS and fact.needs_gradient:
            most = Reach.SAMPLES
        return self._of_numbers(node, most)

    def _note_joined(self, node: fx.Node) -> None:
        """Notes operations along the batch that make counts, and where what was counted over it meets samples."""
        made_of_several = not self._of_several.isdisjoint(_read(node))
        is_long = _is_long(node)
        if self._known[node] is Reach.COUNTS and not is_long:
            if made_of_several or any(map(_is_long, _read(node))):
                self._of_several.add(node)
        elif made_of_several and is_long:
            self.joining.append(node)
        if self._known[node] is Reach.COUNTS and isinstance(node.target, torch._ops.OpOverload):
            self.joining += [node] if counts_along(node, self._sizes) and node not in self.joining else []

    def _is_state(self, node: fx.Node, fact: Fact) -> bool:
        """Whether a node returns a parameter or buffer that it changes, or what a buffer becomes."""
        return bool(fact.writes & fact.makes & self._state) or node in self._becomes_state

    def _source(self, copy: fx.Node) -> Any:
        """Returns what a copy copies, where no view of it did."""
        node: Any = copy.args[1]
        while isinstance(node, fx.Node) and node.name in self._facts and self._facts[node.name].is_view:
            node = node.args[0]
        return node

    def _made_by(self, node: fx.Node) -> frozenset[int]:
        return self._facts[node.name].makes if node.name in self._facts else frozenset()

    def _of_numbers(self, node: fx.Node, most: Reach) -> Reach:
        """Returns the reach of a result that depends on what reaches as far as `most`, by its kind and shape."""
        tensors = _tensors(node)
        if most < Reach.SAMPLES or not tensors:
            return most if tensors else Reach.NONE
        if not any(_has_numbers(tensor) for tensor in tensors):
            return Reach.COUNTS
        return Reach.SAMPLES if _is_long(node) else Reach.ALL

    def _words(self, node: fx.Node) -> str:
        """Returns how a node mixes samples; empty if it does not."""
        value = node.meta.get("val")
        if isinstance(value, Tensor) and self._sizes.mixes_samples(value):
            return f"the value {node.name} has the shape {tuple(value.shape)}"
        if words := self._by_place(node) or in_bags(node) or self._by_count(node):
            return words
        if self._known[node] < Reach.SAMPLES:
            return ""
        checks: tuple[Callable[[fx.Node], str], ...] = (self._brought_back, self._along, self._cut)
        return next((words for check in checks if (words := check(node))), "")

    def _brought_back(self, node: fx.Node) -> str:
        """Finds what was made of all samples and meets each of them, or a layer, again."""
        made_of_all = [each for each in _read(node) if self._known[each] is Reach.ALL]
        if not made_of_all:
            return ""
        what = f"{made_of_all[0].name}, which is made of several samples,"
        if self._known[node] is Reach.SAMPLES:
            return f"{what} meets each sample in {node.name}"
        if node.target in _LAYERS and any(self._is_weight(each) for each in node.all_input_nodes):
            return f"{what} goes through the layer {node.name}"
        return ""

    def _by_place(self, node: fx.Node) -> str:
        """Finds numbers for samples that follow from their places in the batch, and are computed with."""
        takes_rows = name_of(node) in TAKE_ROWS
        if takes_rows is (self._known[node] is Reach.SAMPLES) or not any(map(_has_numbers, _tensors(node))):
            return ""
        for source in _read(node):
            is_of_sizes = self._known[source] is Reach.NONE and self._sizes.has_samples(source)
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

    def _is_weight(self, node: fx.Node) -> bool:
        return self._known[node] is Reach.NONE and self._facts[node.name].needs_gradient

    def _along(self, node: fx.Node) -> str:
        """Finds operations along the batch."""
        return f"{node.name} runs along the batch" if runs_along(node, self._sizes) else ""

    def _mixed_inside(self, node: fx.Node) -> str:
        """Finds modules and functions that are kept whole, and make something else of the parts of a batch."""
        if node.target is not getitem or join_of(node) is not Join.OTHER:
            return ""
        what = f"what {name_of_kept(node)}, which is kept whole, returns"
        if self._known[node] is Reach.NONE:
            return f"the gradient of {what} for the whole batch is no sum of those for its samples"
        return f"{what} for a sample, or its gradient, depends on others," if _is_long(node) else ""

    def _cut(self, node: fx.Node) -> str:
        """Finds other than whole batches: all but the first sample, one half of them, or some rows more."""
        for tensor in _tensors(node):
            if any(self._sizes.is_part(length) for length in tensor.shape):
                return f"{node.name}, of the shape {tuple(tensor.shape)}, leaves samples out or adds some"
        return ""


def _is_long(node: fx.Node) -> bool:
    """Whether a dimension is no plain number: it grows with the batch, or with what was counted in it."""
    return any(isinstance(length, torch.SymInt) for tensor in _tensors(node) for length in tensor.shape)


def _tensors(node: fx.Node) -> list[Tensor]:
    return tensors_in(node.meta.get("val"))


def _read(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments whose numbers a node takes."""
    if node.target in _NOT_COMPUTED_WITH:
        return [each for each in node.all_input_nodes if each is not node.args[_NOT_COMPUTED_WITH[node.target]]]
    return node.all_input_nodes[:1] if node.target in _AS_ANOTHER else node.all_input_nodes


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_shape_alone(node: fx.Node) -> bool:
    target: Any = node.target
    return target is not getitem and str(target).startswith(tuple(f"aten.{name}." for name in _SHAPE_ALONE))
