"""Refuses to average losses that are no means: a root of a mean, or a product of two, is another for micro-batches.

From the loss back, operations on numbers that are made of several samples must keep means: they add such numbers, or
scale them by what has nothing to do with the batch. Where the samples were reduced, they must have been added up: what
does so is listed, and operations on no list are tried out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any, NoReturn

from torch import Tensor, fx

from autovaruna.errors import InputError
from autovaruna.graph.arguments import MEAN, arguments
from autovaruna.graph.batch.adding_up import join_tried
from autovaruna.graph.batch.counted_means import LOSSES
from autovaruna.graph.batch.linear import DIVIDE, JOIN, KEEP_MEANS, SCALE
from autovaruna.graph.batch.reductions import Reductions, is_listed, name_of
from autovaruna.graph.kept_whole.function_joins import join_of
from autovaruna.graph.kept_whole.functions import run_function
from autovaruna.graph.kept_whole.returned import Join
from autovaruna.graph.origin import origin
from autovaruna.graph.outputs import OutputKind
from autovaruna.graph.traced import TracedModel

logger = logging.getLogger(__name__)
_REDUCE_OTHERWISE = frozenset(
    {
        *("norm", "linalg_vector_norm", "linalg_norm", "std", "var", "std_mean", "var_mean", "logsumexp", "prod"),
        *("max", "min", "amax", "amin", "median", "nanmedian", "nanmean", "quantile", "mode", "kthvalue", "dist"),
        *(
            "any",
            "all",
            "argmax",
            "argmin",
            "softmax",
            "log_softmax",
            "_softmax",
            "_log_softmax",
            "linalg_det",
            "logdet",
            "linalg_slogdet",
            "trapezoid",
        ),
    }
)
"""Other operations after which a mean of micro-batches is not that of the batch."""
_ABOUT_FINITE = frozenset({"isnan", "isinf", "isfinite"})
_OF_MASKS = frozenset(
    {"any", "all", "logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or"}
)
_FACTORS = {"lerp": ((0, 1), 2, True), "addcmul": ((1,), 2, True), "addcdiv": ((1,), 2, False)}
"""Operations with two factors: places of those of which each is the first, that of the second, and whether that is one,
not a divisor."""
_PICK = frozenset({"select", "slice", "index", "index_select", "gather", "narrow"})
"""Operations that take some of the samples, where nothing of their result grows with the batch."""


def refuse_nonlinear(traced: TracedModel, is_added: bool = False) -> None:
    """Makes sure that the loss of a graph is a mean over its samples, or a sum; warns of other outputs that are none.

    Args:
        traced: The graph.
        is_added: Whether losses of micro-batches are added up, rather than averaged.

    Raises:
        InputError: the loss is something else; says which line makes it so, and how to go on.
    """
    if traced.sizes.symbol is None:
        return
    means, reductions = _Means(traced), Reductions(traced.sizes, traced.batch_inputs, is_added)
    for spec in traced.outputs:
        if spec.kind not in (OutputKind.LOSS, OutputKind.MEAN):
            continue
        node = traced.nodes[spec.node]
        found = means.broken_in(node) or reductions.no_mean_in(node)
        if found is not None and spec.kind is OutputKind.MEAN:
            logger.warning(
                "%s is no mean over the samples (%s): got the mean of what micro-batches give. Compute it outside of "
                "the model to have that of the whole batch.",
                *(spec.path, origin(found) or found.name),
            )
        elif found is not None:
            _refuse(found)


def _refuse(found: fx.Node) -> NoReturn:
    raise InputError(
        f"The loss of the model is no mean over its samples: {found.name}, at {origin(found) or found.name}, goes on "
        "from numbers that are made of several samples, or makes them in another way than by adding up, but losses of "
        "micro-batches are averaged. Return what it is computed from, and compute it outside of the model, from the "
        "outputs of the whole batch; or pass num_micro_batches=1, with inputs='replicated' on several ranks; or "
        "dynamic_batch=False: each micro-batch is then a batch of its own to the model."
    )


class _Means:
    """Follows a loss back to where samples were reduced."""

    def __init__(self, traced: TracedModel) -> None:
        self._sizes = traced.sizes
        self._facts = traced.facts
        self._fed: set[fx.Node] = set()
        for node in traced.module.graph.nodes:
            is_made = not self._fed.isdisjoint(node.all_input_nodes) and not self._sizes.is_given(node)
            if is_made or node.name in traced.batch_inputs:
                self._fed.add(node)

    def broken_in(self, loss: fx.Node) -> fx.Node | None:
        """Returns the first operation that makes something else of a mean; None: there is none."""
        waiting, seen = [loss], {loss}
        found: list[fx.Node] = []
        while waiting:
            node = waiting.pop()
            if node.op != "call_function" or not self._is_joint(node):
                continue
            if self._breaks(node):
                found.append(node)
            new = [source for source in node.all_input_nodes if source not in seen]
            seen.update(new)
            waiting += new
        return min(found, default=None)

    def _breaks(self, node: fx.Node) -> bool:
        if node.target is getitem:
            return self._is_unknown(node) or join_tried(node, self._sizes) is Join.OTHER
        name = name_of(node)
        if not name:
            return False
        if name in _REDUCE_OTHERWISE:
            return True
        joint = [self._is_joint(source) for source in node.all_input_nodes]
        if name in SCALE:
            return sum(joint) > 1 or self._divides(node, name in DIVIDE) or (any(joint) and self._squares(node))
        if name in _FACTORS:
            return self._joins_factors(node, *_FACTORS[name])
        if any(joint):
            return name not in KEEP_MEANS | JOIN and not self._facts[node.name].is_view
        if name in _PICK or self._averages_counted(node, name):
            return True
        return not is_listed(node) and self._joins(node)

    def _joins(self, node: fx.Node) -> bool:
        """Whether a node, which no list here names, makes something else of several samples than a sum or a mean."""
        is_made = any(map(self._sizes.has_samples, node.all_input_nodes))
        return is_made and join_tried(node, self._sizes) is Join.OTHER

    def _divides(self, node: fx.Node, is_quotient: bool) -> bool:
        return is_quotient and self._is_joint(node.args[1])

    def _joins_factors(self, node: fx.Node, first: Sequence[int], second: int, is_linear: bool) -> bool:
        """Whether a node multiplies two means, or divides by one."""
        has_first = any(self._is_joint(node.args[place]) for place in first)
        return self._is_joint(node.args[second]) and (has_first or not is_linear)

    def _is_unknown(self, node: fx.Node) -> bool:
        """Whether a node is what a module or function that is kept whole makes of means, or of samples, but no mean."""
        made: Any = node.args[0]
        join = join_of(node)
        if join is None:
            return False
        is_guess = join is Join.UNKNOWN and made.target is run_function
        return join is Join.OTHER or is_guess or any(map(self._is_joint, made.all_input_nodes))

    def _averages_counted(self, node: fx.Node, name: str) -> bool:
        """Whether a node is a mean over as many numbers as numbers of the model say; counts of inputs are parted."""
        given = arguments(node)
        if name != "mean" and given.get("reduction") != MEAN:
            return False
        return any(map(self._sizes.depends_on_data, node.all_input_nodes)) or self._averages_labels(node, given)

    def _averages_labels(self, node: fx.Node, given: Mapping[str, Any]) -> bool:
        """Whether a loss is averaged over labels of the model's own of which some may not count, or weigh more."""
        if node.target not in LOSSES or not self._is_label(given["target"]):
            return False
        return given.get("weight") is not None or may_hold(given["target"], given["ignore_index"])

    def _is_label(self, target: fx.Node) -> bool:
        return not target.meta["val"].is_floating_point()

    def _squares(self, node: fx.Node) -> bool:
        """Whether a product takes the same numbers twice."""
        return len(node.args) > 1 and node.args[0] is node.args[1]

    def _is_joint(self, node: Any) -> bool:
        """Whether a value is made of several samples: it depends on the batch, and has none."""
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if node not in self._fed or not isinstance(value, Tensor) or _says_what_is_finite(node):
            return False
        return not self._sizes.has_samples(node)


def may_hold(labels: fx.Node, ignored: int) -> bool:
    """Whether integers that a model makes may be those of labels that do not count: it names that number somewhere."""
    seen, waiting = {labels}, [labels]
    while waiting:
        node = waiting.pop()
        if any(argument == ignored for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, int)):
            return True
        new = {each for each in node.all_input_nodes if _is_whole(each)} - seen
        seen |= new
        waiting += new
    return False


def _is_whole(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, Tensor) and not value.is_floating_point()


def _says_what_is_finite(node: fx.Node) -> bool:
    """Whether a mask says where numbers are finite: with sound numbers it is the same in every micro-batch."""
    if name_of(node) in _ABOUT_FINITE:
        return True
    return name_of(node) in _OF_MASKS and all(map(_says_what_is_finite, node.all_input_nodes))
