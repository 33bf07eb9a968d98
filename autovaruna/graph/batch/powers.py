"""Follows a value back to where the samples of a batch were reduced, and with which power of their number it grows.

Nothing in a loss's shape tells a sum over the samples from a mean, but its last operations do: from the loss back,
through what only scales, adds or reshapes, to where the samples were reduced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import getitem
from typing import Any

from torch import fx

from autovaruna.graph.batch.drawn import join_tried
from autovaruna.graph.batch.interpret import Values, is_number
from autovaruna.graph.batch.operators import KEEPING, SCALING, Means, Trait, adds_up, has, is_listed, operator_of
from autovaruna.graph.batch.values import Source, Use, is_of_batch, reached
from autovaruna.graph.opaque.infer_reduction import reduction_of
from autovaruna.graph.opaque.run import Reduction, opaque_module_of
from autovaruna.graph.sizes import Sizes

_SIZES = (1, 2, 3, 8)
_POWERS = {Use.PLAIN: 0.0, Use.DIVISOR: 1.0, Use.FACTOR: -1.0}
"""How what a micro-batch gets of a value of the whole batch grows with it."""


class Powers:
    """Finds the reductions that a value is made of, each with the power of the batch size that scales it.

    Args:
        values: What the nodes have to do with the batch.
        sizes: Says what grows with the batch.
        is_added: Whether losses of micro-batches are added up: each gets values of the whole batch as they are.
    """

    def __init__(self, values: Values, sizes: Sizes, is_added: bool = False) -> None:
        self._values = values
        self._sizes = sizes
        self._is_added = is_added

    def sum_in(self, node: Any) -> fx.Node | None:
        """Returns the sum over the samples that a value is, or holds as a part; None if there is none."""
        return next((made for made, power in self._reduced(node, 0.0, set()) if power == 1.0), None)

    def no_mean_in(self, node: Any) -> fx.Node | None:
        """Returns the part of a value that another power of the batch size scales than a mean or a sum; None: none."""
        return next((made for made, power in self._reduced(node, 0.0, set()) if power not in (0.0, 1.0)), None)

    def no_sum_in(self, node: Any) -> fx.Node | None:
        """Returns the part of a value that is no sum over the samples; None if all of it is one, or may be."""
        parts = self._reduced(node, 0.0, set())
        return next(
            (made for made, power in parts if power != 1.0 and reduction_of(made) is not Reduction.UNKNOWN), None
        )

    def ends_in_sums(self, node: fx.Node, tail: Collection[fx.Node]) -> bool:
        """Whether numbers of samples are scaled and added up over the samples, and nothing else.

        Args:
            node: The numbers.
            tail: What goes into the outputs by being scaled and added up alone.
        """
        scaled = reached([node], lambda each: each.users if self._grows(each) else ())
        return all(each in tail and (self._grows(each) or self._is_sum(each)) for each in scaled)

    def _reduced(self, node: Any, power: float, seen: set[Any]) -> Iterator[tuple[fx.Node, float]]:
        """Yields what samples were reduced to in a value, and with which power of their number it goes into that."""
        if not isinstance(node, fx.Node) or (node, power) in seen or self._grows(node) or self._sizes.is_given(node):
            return
        seen.add((node, power))
        if node.target is getitem or any(map(self._grows, node.all_input_nodes)):
            for scale in self._scales(node):
                yield node, power + self._is_sum(node) + scale
            return
        means, source = operator_of(node).means, self._values[node].source
        if means in SCALING:
            yield from self._scaled(node, power, seen)
        elif means in KEEPING or means is Means.PRODUCT:
            for each in node.all_input_nodes:
                yield from self._reduced(each, power, seen)
        elif power not in (self._is_added, 1.0) and Source.STATE in source and Source.BATCH not in source:
            yield node, power

    def _scaled(self, node: fx.Node, power: float, seen: set[Any]) -> Iterator[tuple[fx.Node, float]]:
        is_quotient = operator_of(node).means is Means.DIVIDE
        for value, scale in [node.args[:2], *([] if is_quotient else [node.args[1::-1]])]:
            by = self._power(scale)
            if by is not None:
                yield from self._reduced(value, power - by if is_quotient else power + by, seen)

    def _scales(self, node: fx.Node) -> set[float]:
        """Returns the powers of the batch size that scale the terms of what a node adds up of samples."""

        def terms(last: fx.Node) -> Iterable[fx.Node]:
            is_through = last is node or last.target is getitem or operator_of(last).means in KEEPING | SCALING
            return filter(self._grows, last.all_input_nodes) if is_through else ()

        found: dict[fx.Node, set[float]] = {}
        for term in sorted(reached([node], terms)):
            means = operator_of(term).means
            if means in SCALING:
                first, second = (self._powers(each, found) for each in term.args[:2])
                sign = -1.0 if means is Means.DIVIDE else 1.0
                made = {one + sign * other for one in first for other in second}
                found[term] = {math.nan if math.isnan(each) else each for each in made}  # one object, not many
            else:
                found[term] = set().union(*(found[each] for each in term.all_input_nodes if each in found)) or {0.0}
        return found[node]

    def _powers(self, factor: Any, found: Mapping[fx.Node, set[float]]) -> set[float]:
        """Returns the powers of the batch size that scale a factor's terms."""
        if self._grows(factor):
            return found.get(factor, {0.0})
        return {self._power(factor) or 0.0}

    def _is_sum(self, node: fx.Node) -> bool:
        if node.target is getitem:
            made: Any = node.args[0]
            kept = opaque_module_of(made)
            is_named = kept is not None and kept.adds_up(int(node.args[1]))  # type: ignore[arg-type]
            return is_named or (reduction_of(node) or join_tried(node, self._sizes)) is Reduction.SUM
        if is_listed(node) or not any(map(self._grows, node.all_input_nodes)):
            return adds_up(node)
        return join_tried(node, self._sizes) is Reduction.SUM

    def _grows(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and self._sizes.has_samples(node)

    def _power(self, scale: Any) -> float | None:
        """Returns with which power of the batch size a factor grows; NaN: with none, None: it is made of samples."""
        if not isinstance(scale, fx.Node):
            return 0.0
        if is_of_batch(scale):
            return 0.0 if self._is_added else _POWERS[scale.args[1]]  # type: ignore[index]
        if self._sizes.is_given(scale):
            return self._power_of(scale.meta["val"])
        if has(scale, Trait.SAME_NUMBER) and len(scale.all_input_nodes) == 1 and is_number(scale):
            return self._power(scale.all_input_nodes[0])
        return None if Source.BATCH in self._values[scale].source else 0.0

    def _power_of(self, number: Any) -> float:
        first, *others = (float(self._sizes.number(number, size)) for size in _SIZES)
        if first == 0.0 or not all(first * other > 0.0 for other in others):
            return math.nan
        powers = [math.log(other / first, size) for other, size in zip(others, _SIZES[1:], strict=True)]
        nearest = float(round(powers[0]))
        return nearest if all(math.isclose(each, nearest, abs_tol=1e-6) for each in powers) else math.nan
