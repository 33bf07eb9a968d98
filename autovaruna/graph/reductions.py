"""Follows a value back to where the samples of a batch were reduced."""

from __future__ import annotations

from collections.abc import Collection
from operator import getitem
from typing import Any

import torch
from torch import fx

from autovaruna.graph.arguments import SUM, arguments
from autovaruna.graph.kept import KeptModule, run_kept
from autovaruna.graph.sizes import Sizes

aten = torch.ops.aten
_SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList, aten.nansum.default})
_ADDS = frozenset({aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor, aten.stack.default})
_SCALES = frozenset({aten.mul.Tensor, aten.mul_.Tensor, aten.div.Tensor, aten.div_.Tensor})
_KEEPS = frozenset(
    {
        *(aten.neg.default, aten.clone.default, aten.alias.default, aten.squeeze.default, aten.view.default),
        *(aten.reshape.default, aten.to.dtype, aten._to_copy.default, aten.mean.default, *_SUMS),
    }
)


class Reductions:
    """Follows a value back to where the samples were reduced.

    Args:
        sizes: Says what grows with the batch.
        inputs: Names of the inputs whose first dimension is the batch.
    """

    def __init__(self, sizes: Sizes, inputs: Collection[str]) -> None:
        self._sizes = sizes
        self._inputs = inputs

    def sum_in(self, node: Any) -> fx.Node | None:
        """Returns the sum over the samples that a value is, or holds as a part; None if there is none."""
        if not isinstance(node, fx.Node) or node.op != "call_function" or self._grows(node):
            return None
        if self._is_sum(node):
            return node
        if node.target in _ADDS:
            terms = node.args[0] if node.target is aten.stack.default else node.args
            return next((made for term in terms if (made := self.sum_in(term)) is not None), None)  # type: ignore[union-attr]
        if node.target in _KEEPS:
            return self.sum_in(node.args[0])
        if node.target in _SCALES:
            value, scale = node.args[:2]
            return self.sum_in(value) if self._is_same_for_all(scale) else self._scaled(node)
        return None

    def _scaled(self, node: fx.Node) -> fx.Node | None:
        """Returns the sum in a product whose first factor is the constant."""
        is_product = node.target in (aten.mul.Tensor, aten.mul_.Tensor)
        return self.sum_in(node.args[1]) if is_product and self._is_same_for_all(node.args[0]) else None

    def _is_sum(self, node: fx.Node) -> bool:
        if node.target in _SUMS:
            return self._grows(node.args[0])
        if node.target is getitem:
            made: Any = node.args[0]
            kept = getattr(node.graph.owning_module, str(made.args[0].target)) if made.target is run_kept else None
            return isinstance(kept, KeptModule) and kept.adds_up
        return self._grows(node.args[0] if node.args else None) and arguments(node).get("reduction") == SUM

    def _grows(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and self._sizes.has_samples(node)

    def _is_same_for_all(self, scale: Any) -> bool:
        """Whether a factor has nothing to do with the batch, so that it is the same in every micro-batch."""
        if not isinstance(scale, fx.Node):
            return not isinstance(scale, torch.SymInt | torch.SymFloat)
        seen, open_ = {scale}, [scale]
        while open_:
            node = open_.pop()
            if node.name in self._inputs:
                return False
            new = set(node.all_input_nodes) - seen
            seen |= new
            open_ += new
        return True
