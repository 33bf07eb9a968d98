"""Parts each mean over a number of elements that the inputs decide into a sum and its count.

Such are the losses over the labels that are not ignored, and means of what a mask has picked. Micro-batches have
unequal counts, so the mean of their means is not that of the batch; a sum over the count of all of them is its part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autovaruna.graph.batch.additions import Additions
from autovaruna.graph.batch.interpret import has_numbers, picked_symbols
from autovaruna.graph.batch.operators import SUM_OF, Trait, aten, has
from autovaruna.graph.batch.values import count_by_class
from autovaruna.graph.sizes import Sizes
from autovaruna.graph.versions import MEAN, SUM, arguments, give

_HALF = frozenset({torch.float16, torch.bfloat16})


def part_means(graph: fx.Graph, known: Collection[fx.Node], sizes: Sizes, additions: Additions) -> None:
    """Parts the means of a graph whose counts follow from its inputs.

    Args:
        graph: The graph; changed.
        known: The nodes that follow from the inputs alone.
        sizes: Says what grows with the batch.
        additions: Adds nodes to the graph.
    """
    means = _Means(graph, set(known), sizes, additions)
    for node in list(graph.nodes):
        count = means.count_of(node) if node.op == "call_function" else None
        if count is not None:
            means.part(node, count)


class _Means:
    def __init__(self, graph: fx.Graph, known: set[fx.Node], sizes: Sizes, additions: Additions) -> None:
        self._known = known
        self._sizes = sizes
        self._add = additions
        self._masks = {symbol: mask for symbol, mask in picked_symbols(graph).items() if mask in known}

    def count_of(self, node: fx.Node) -> Callable[[], fx.Node] | None:
        """Returns what adds the count to the graph over which a node averages; None: it does not, or over all alike."""
        if has(node, Trait.AVERAGES_LABELS):
            given = arguments(node)
            target, weight = given["target"], given.get("weight")
            is_known = target in self._known and (weight is None or weight in self._known)
            if given["reduction"] != MEAN or not is_known or not self._counts_labels(target):
                return None
            return lambda: self._labels(node, target, weight, given["ignore_index"])
        if node.target in SUM_OF or arguments(node).get("reduction") == MEAN:
            return self._picked(node)
        return None

    def part(self, node: fx.Node, count: Callable[[], fx.Node]) -> None:
        """Puts a sum over the count in the place of a mean."""
        users = list(node.users)
        made = count()
        dtype = node.meta["val"].dtype
        if dtype in _HALF:  # a sum of many would overflow
            node.args = tuple(self._wide(node, argument) for argument in node.args)
        if node.target in SUM_OF:
            node.target = SUM_OF[node.target]
        else:
            give(node, reduction=SUM)
        self._add.learn(node)
        after = node.next
        mean = self._add.before(after, aten.div.Tensor, node, made)
        if dtype in _HALF:
            mean = self._add.before(after, aten.to.dtype, mean, dtype)
        for user in users:
            user.replace_input_with(node, mean)

    def _wide(self, node: fx.Node, argument: Any) -> Any:
        value = argument.meta["val"] if isinstance(argument, fx.Node) else None
        is_half = isinstance(value, Tensor) and value.dtype in _HALF
        return self._add.before(node, aten.to.dtype, argument, torch.float32) if is_half else argument

    def _counts_labels(self, target: fx.Node) -> bool:
        """Whether a target is one of class numbers that grows with the batch, or with what was picked from it."""
        return not has_numbers(target.meta["val"]) and self._sizes.has_samples(target)

    def _labels(self, node: fx.Node, target: fx.Node, weight: fx.Node | None, ignored: int) -> fx.Node:
        """Adds the number of labels that are not ignored, or the sum of the weights of their classes."""
        is_counted = self._add.before(node, aten.ne.Scalar, target, ignored)
        if weight is None:
            return self._add.before(node, aten.sum.default, is_counted)
        if weight.op in ("get_attr", "placeholder"):
            some_class = self._add.before(node, aten.mul.Tensor, target, is_counted)
            weights = self._add.before(node, aten.index.Tensor, weight, [some_class])
            weights = self._add.before(node, aten.mul.Tensor, weights, is_counted)
        else:  # it may itself be made of the labels
            num_classes = weight.meta["val"].shape[0]
            by_class = self._add.before(node, count_by_class, target, ignored, num_classes)
            weights = self._add.before(node, aten.mul.Tensor, weight, by_class)
        return self._add.before(node, aten.sum.default, weights)

    def _picked(self, node: fx.Node) -> Callable[[], fx.Node] | None:
        """Returns what adds the number of elements that a node averages, if they were picked by the inputs."""
        value, result = node.args[0], node.meta["val"]
        if not isinstance(value, fx.Node) or not self._sizes.depends_on_data(value) or not isinstance(result, Tensor):
            return None
        if self._sizes.depends_on_data(node) or not isinstance(value.meta["val"], Tensor):
            return None
        averaged = sympy.Integer(1)
        for length in value.meta["val"].shape:
            averaged *= length.node.expr if isinstance(length, torch.SymInt) else length
        for length in result.shape:
            averaged /= length.node.expr if isinstance(length, torch.SymInt) else length
        symbols = [symbol for symbol in averaged.free_symbols if symbol in self._masks]
        if len(symbols) != 1 or not (averaged / symbols[0]).is_Integer:
            return None
        factor = int(averaged / symbols[0])

        def add() -> fx.Node:
            count = self._add.before(node, aten.count_nonzero.default, self._masks[symbols[0]])
            return count if factor == 1 else self._add.before(node, aten.mul.Tensor, count, factor)

        return add
