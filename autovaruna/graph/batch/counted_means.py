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

from autovaruna.graph.arguments import MEAN, SUM, arguments, give
from autovaruna.graph.batch.additions import Additions
from autovaruna.graph.batch.class_counts import count_by_class
from autovaruna.graph.sizes import Sizes

aten = torch.ops.aten
LOSSES = frozenset(
    {aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default}
)
"""Losses over labels of which some may be ignored."""
_MEANS = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}
_PICKS = {aten.masked_select.default: 1, aten.nonzero.default: 0}
"""Operations that pick elements, and the place of the mask that says which."""
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
        self._counts = _counted_symbols(graph, known)

    def count_of(self, node: fx.Node) -> Callable[[], fx.Node] | None:
        """Returns what adds the count to the graph over which a node averages; None: it does not, or over all alike."""
        if node.target in LOSSES:
            given = arguments(node)
            target, weight = given["target"], given.get("weight")
            is_known = target in self._known and (weight is None or weight in self._known)
            if given["reduction"] != MEAN or not is_known or not self._counts_labels(target):
                return None
            return lambda: self._labels(node, target, weight, given["ignore_index"])
        if node.target in _MEANS or arguments(node).get("reduction") == MEAN:
            return self._picked(node)
        return None

    def part(self, node: fx.Node, count: Callable[[], fx.Node]) -> None:
        """Puts a sum over the count in the place of a mean."""
        users = list(node.users)
        made = count()
        dtype = node.meta["val"].dtype
        if dtype in _HALF:  # a sum of many would overflow
            node.args = tuple(self._wide(node, argument) for argument in node.args)
        if node.target in _MEANS:
            node.target = _MEANS[node.target]
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
        value = target.meta["val"]
        is_whole = not (value.is_floating_point() or value.is_complex())
        return is_whole and self._sizes.has_samples(target)

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
        symbols = [symbol for symbol in averaged.free_symbols if symbol in self._counts]
        if len(symbols) != 1 or not (averaged / symbols[0]).is_Integer:
            return None
        factor = int(averaged / symbols[0])

        def add() -> fx.Node:
            count = self._add.before(node, *self._counts[symbols[0]])
            return count if factor == 1 else self._add.before(node, aten.mul.Tensor, count, factor)

        return add


def _counted_symbols(graph: fx.Graph, known: Collection[fx.Node]) -> dict[Any, tuple[Any, ...]]:
    """Returns, for each size that is a number of picked elements, the operation that counts them in the inputs."""
    return {
        symbol: (aten.count_nonzero.default, mask) for symbol, mask in picked_symbols(graph).items() if mask in known
    }


def picked_symbols(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Returns the sizes that are numbers of picked elements, each with the tensor that says which those are."""
    found: dict[Any, fx.Node] = {}
    seen: set[Any] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        new = _symbols(value) - seen
        seen |= new
        mask = _mask(node)
        if isinstance(value, Tensor) and len(new) == 1 and mask is not None:
            found |= dict.fromkeys(new, mask)
    return found


def _mask(node: fx.Node) -> fx.Node | None:
    """Returns the tensor whose elements other than zero a node picks, or finds."""
    if node.target in _PICKS:
        mask: Any = node.args[_PICKS[node.target]]
        return mask  # type: ignore[no-any-return]
    if node.target is aten.index.Tensor:
        masks = [each for each in node.args[1] if each is not None]  # type: ignore[union-attr]
        is_one = len(masks) == 1 and masks[0].meta["val"].dtype is torch.bool  # type: ignore[union-attr]
        return masks[0] if is_one else None  # type: ignore[return-value]
    return None


def _symbols(value: Any) -> set[Any]:
    lengths = value.shape if isinstance(value, Tensor) else (value,)
    sizes = [each for each in lengths if isinstance(each, torch.SymInt)]
    return {symbol for each in sizes for symbol in each.node.expr.free_symbols}
