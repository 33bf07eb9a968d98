"""Refuses to average losses that are no means: a root of a mean, or a product of two, is another for micro-batches.

From the loss back, operations on numbers that are made of several samples must keep means: they add such numbers, or
scale them by what has nothing to do with the batch. Where the samples were reduced, they must have been added up.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from autovaruna.errors import InputError
from autovaruna.graph.arguments import MEAN, arguments
from autovaruna.graph.origin import origin
from autovaruna.graph.outputs import OutputKind
from autovaruna.graph.traced import TracedModel

logger = logging.getLogger(__name__)
aten = torch.ops.aten
_KEEP_MEANS = frozenset(
    {
        *("add", "add_", "sub", "sub_", "rsub", "neg", "neg_", "lerp", "addcmul", "addcdiv", "where", "nan_to_num"),
        *("to", "_to_copy", "clone", "copy_", "masked_fill", "masked_fill_", "zeros_like", "ones_like", "full_like"),
        *("fill", "fill_", "positive", "detach", "real", "imag", "view_as_real", "view_as_complex"),
    }
)
"""Pointwise operations that keep means, or take nothing of their argument but its shape."""
_JOIN = frozenset(
    {
        *("sum", "nansum", "mean", "cumsum", "trace", "stack", "cat", "hstack", "vstack", "concat", "repeat", "flip"),
        *("roll", "index", "index_select", "gather", "index_put", "index_put_", "index_add", "index_add_", "scatter"),
        *("scatter_add", "scatter_add_", "select_scatter", "slice_scatter", "constant_pad_nd", "pad", "diag", "tile"),
        *("contiguous", "reshape", "flatten", "view_as", "expand_as", "type_as", "lift_fresh_copy", "_unsafe_view"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "empty_like", "resolve_conj", "resolve_neg"),
    }
)
"""Operations that add numbers of an argument up, or put them elsewhere."""
_SCALE = frozenset({"mul", "mul_", "div", "div_", "matmul", "mm", "bmm", "mv", "dot", "linear", "addmm", "baddbmm"})
"""Operations that are linear in each argument."""
_REDUCE_OTHERWISE = frozenset(
    {
        *("norm", "linalg_vector_norm", "linalg_norm", "std", "var", "std_mean", "var_mean", "logsumexp", "prod"),
        *("max", "min", "amax", "amin", "median", "nanmedian", "quantile", "mode", "kthvalue", "dist"),
        *("softmax", "log_softmax", "_softmax", "_log_softmax", "linalg_det", "logdet", "linalg_slogdet", "trapezoid"),
    }
)
"""Other operations after which a mean of micro-batches is not that of the batch."""
_PICK = frozenset({"select", "slice", "index", "index_select", "gather", "narrow"})
"""Operations that take some of the samples, where nothing of their result grows with the batch."""


def refuse_nonlinear(traced: TracedModel) -> None:
    """Makes sure that the loss of a graph is a mean over its samples; warns of other outputs that are none.

    Raises:
        InputError: the loss is something else; says which line makes it so, and how to go on.
    """
    if traced.sizes.symbol is None:
        return
    means = _Means(traced)
    for spec in traced.outputs:
        found = means.broken_in(traced.nodes[spec.node]) if spec.kind in (OutputKind.LOSS, OutputKind.MEAN) else None
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
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return False
        name = target.overloadpacket.__name__
        joint = sum(self._is_joint(source) for source in node.all_input_nodes)
        if name in _REDUCE_OTHERWISE:
            return True
        if name in _SCALE:
            divides = name.startswith("div") and isinstance(node.args[1], fx.Node) and self._is_joint(node.args[1])
            return joint > 1 or divides or (joint > 0 and self._squares(node))
        if joint:
            return name not in _KEEP_MEANS | _JOIN and not self._facts[node.name].is_view
        return name in _PICK or self._averages_counted(node, name)

    def _averages_counted(self, node: fx.Node, name: str) -> bool:
        """Whether a node is a mean over as many numbers as numbers of the model say; counts of inputs are parted."""
        is_mean = name == "mean" or arguments(node).get("reduction") == MEAN
        return is_mean and any(self._sizes.depends_on_data(source) for source in node.all_input_nodes)

    def _squares(self, node: fx.Node) -> bool:
        """Whether a product takes the same numbers twice."""
        return len(node.args) > 1 and node.args[0] is node.args[1]

    def _is_joint(self, node: fx.Node) -> bool:
        """Whether a value holds numbers that are made of several samples: it depends on the batch, and has none."""
        value = node.meta.get("val")
        if node not in self._fed or not isinstance(value, Tensor) or not value.is_floating_point():
            return False
        return not self._sizes.has_samples(node)
