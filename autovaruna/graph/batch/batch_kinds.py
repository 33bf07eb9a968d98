"""Tells which values that follow from a model's inputs are of the whole batch, and how mini-batches' are merged."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, IntEnum
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna.graph.batch.class_counts import count_by_class
from autovaruna.graph.batch.counted_means import picked_symbols
from autovaruna.graph.batch.of_batch import is_of_batch
from autovaruna.graph.sizes import Sizes

aten = torch.ops.aten
_MOST_ELEMENTS = 65_536
DIVISIONS = frozenset({aten.div.Tensor, aten.div_.Tensor})
PRODUCTS = frozenset({aten.mul.Tensor, aten.mul_.Tensor})


class Merge(str, Enum):
    """How the totals of several mini-batches become that of all."""

    SUM = "sum"
    MEAN = "mean"
    LARGEST = "largest"
    SMALLEST = "smallest"


_MERGES: dict[Any, Merge] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.nansum.default), Merge.SUM),
    **dict.fromkeys((aten.count_nonzero.default, aten.count_nonzero.dim_IntList), Merge.SUM),
    count_by_class: Merge.SUM,
    **dict.fromkeys((aten.mean.default, aten.mean.dim), Merge.MEAN),
    **dict.fromkeys((aten.max.default, aten.amax.default, aten.max.dim), Merge.LARGEST),
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), Merge.LARGEST),
    **dict.fromkeys((aten.min.default, aten.amin.default, aten.min.dim), Merge.SMALLEST),
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), Merge.SMALLEST),
}


class Kind(IntEnum):
    """What a value that follows from the inputs has to do with the batch."""

    FIXED = 0
    """Nothing, or it follows from its size."""
    WHOLE = 1
    """It is a total, or made of totals."""
    SAMPLES = 2
    """It has numbers of samples, or cannot be merged."""
    AFTER = 3
    """It joins the two."""


class Kinds:
    """Tells the kind of each node that follows from the inputs; `merges` has the totals."""

    def __init__(self, graph: fx.Graph, known: Sequence[fx.Node], sizes: Sizes, batch: Collection[str]) -> None:
        self._sizes = sizes
        self._batch = batch
        self._picked = picked_symbols(graph)
        self._extremes: set[fx.Node] = set()
        self.merges: dict[fx.Node, Merge] = {}
        self.of: dict[fx.Node, Kind] = {}
        for node in known:
            self.of[node] = self._kind(node)
            if self.of[node] is Kind.WHOLE and self._is_extreme(node):
                self._extremes.add(node)

    def goes_on(self, value: fx.Node, user: fx.Node) -> bool:
        """Whether a node goes on from a value of the whole batch to numbers of a micro-batch, or to the loss."""
        if user.op != "call_function" or self.of.get(user) in (Kind.FIXED, Kind.WHOLE) or is_of_batch(user):
            return False
        result = user.meta.get("val")
        if not isinstance(result, Tensor):
            return False
        if not (result.is_floating_point() or result.is_complex()):
            return not self.is_number(value) and not self._is_own_size(value)
        return not self.is_number(value) or user.target in DIVISIONS | PRODUCTS

    def is_length(self, node: fx.Node) -> bool:
        """Whether a node is the number in the greatest or least of the batch, or follows from such numbers alone.

        What it makes the size of is as long in every micro-batch.
        """
        return node in self._extremes and self.is_number(node)

    def _is_own_size(self, value: fx.Node) -> bool:
        """Whether a tensor becomes a size that stays that of the micro-batch: integers that go with it stay so, too."""
        users = [user for user in value.users if self.of.get(user) is Kind.WHOLE and user not in self._extremes]
        return any(self.is_number(user) or self._is_own_size(user) for user in users)

    def _is_extreme(self, node: fx.Node) -> bool:
        """Whether a value of the whole batch is the greatest or the least, or follows from such values alone."""
        if node in self.merges:
            return self.merges[node] in (Merge.LARGEST, Merge.SMALLEST)
        sources = [source for source in node.all_input_nodes if self.of[source] is Kind.WHOLE]
        return self._extremes.issuperset(sources)

    def is_number(self, node: fx.Node) -> bool:
        """Whether a node is a plain number, not a tensor."""
        return not isinstance(node.meta["val"], Tensor)

    def _kind(self, node: fx.Node) -> Kind:
        if node.op == "placeholder":
            return Kind.SAMPLES if node.name in self._batch else Kind.FIXED
        if node.op == "get_attr" or self._sizes.is_given(node):
            return Kind.FIXED
        sources = [self.of[source] for source in node.all_input_nodes]
        most = max(sources, default=Kind.FIXED)
        if most is Kind.SAMPLES and Kind.WHOLE in sources:
            return Kind.AFTER
        if most is Kind.SAMPLES and (merge := self._merge(node)) is not None:
            self.merges[node] = merge
            return Kind.WHOLE
        if most is Kind.WHOLE and not self._is_small(node):
            return Kind.AFTER
        return most

    def _merge(self, node: fx.Node) -> Merge | None:
        """Returns how the results of a node for several mini-batches are merged; None: no way is known."""
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            return Merge.SUM if value.node.expr in self._picked and node.target is aten.sym_size.int else None
        made: Any = node.args[0] if node.target is getitem and node.args[1] == 0 else node
        merge = _MERGES.get(made.target)
        source = made.args[0]
        if merge is None or not self._is_small(node) or not isinstance(source, fx.Node):
            return None
        if not self._sizes.has_samples(source):
            return None
        return None if merge is Merge.MEAN and self._sizes.depends_on_data(source) else merge

    def _is_small(self, node: fx.Node) -> bool:
        value = node.meta["val"]
        if isinstance(value, Tensor):
            return all(isinstance(length, int) for length in value.shape) and value.numel() <= _MOST_ELEMENTS
        return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
