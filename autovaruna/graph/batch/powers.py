"""Says with which power of the number of samples a value grows.

A sum over the samples is told from a mean by the last operations of a loss: from it back, through what scales, adds or
reshapes, to where samples were reduced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from operator import getitem
from typing import Any

from torch import fx

from autovaruna.graph.batch.interpret import BatchAnalysis, is_number
from autovaruna.graph.lengths import Sizes
from autovaruna.graph.opaque.run import OpaqueModule, opaque_module_of
from autovaruna.graph.operators import (
    KEEPING,
    SCALING,
    Linearity,
    ScalingUse,
    Trait,
    ValueSource,
    adds_up,
    has,
    is_of_batch,
    operator_of,
    reached,
)

_SIZES = (1, 2, 3, 8, 97, 1009, 65537)  # small and large ones, for min(len(x), 16) is a size up to there
_POWERS = {ScalingUse.PLAIN: 0.0, ScalingUse.DIVISOR: 1.0, ScalingUse.FACTOR: -1.0}
"""How what a micro-batch gets of a value of the whole batch grows with it."""


class Powers:
    """Finds the reductions that a value is made of, each with the power of the batch size that scales it.

    With `is_added`, losses of micro-batches are added up: each gets values of the whole batch as they are.
    """

    def __init__(self, values: BatchAnalysis, sizes: Sizes, is_added: bool = False) -> None:
        self._values, self._sizes, self._is_added = values, sizes, is_added

    def sum_in(self, node: Any) -> fx.Node | None:
        """Returns the sum over the samples that a value is, or holds as a part; None if there is none."""
        return next((made for made, power in self._reduced(node, 0.0, set()) if power == 1.0), None)

    def no_mean_in(self, node: Any) -> fx.Node | None:
        """Returns the part of a value that another power of the batch size scales than a mean or a sum; None: none."""
        return next((made for made, power in self._reduced(node, 0.0, set()) if power not in (0.0, 1.0)), None)

    def no_sum_in(self, node: Any) -> fx.Node | None:
        """Returns the part of a value that is no sum over the samples; None if all of it is one, or may be."""
        return next((made for made, power in self._reduced(node, 0.0, set()) if power != 1.0), None)

    def ends_in_sums(self, node: fx.Node, tail: Collection[fx.Node]) -> bool:
        """Whether numbers of samples are scaled and added up to what is in `tail`, and nothing else."""
        scaled = reached([node], lambda each: each.users if self._grows(each) else ())
        return all(each in tail and (self._grows(each) or _is_sum(each)) for each in scaled)

    def _reduced(self, node: Any, power: float, seen: set[Any]) -> Iterator[tuple[fx.Node, float]]:
        """Yields what samples were reduced to in a value, and with which power of their number it goes into that."""
        if not isinstance(node, fx.Node) or (node, power) in seen or self._grows(node) or self._sizes.is_given(node):
            return
        seen.add((node, power))
        if (kept := _kept(node)) is not None and not kept.adds_up:
            return  # the first step tells
        if node.target is getitem or any(map(self._grows, node.all_input_nodes)):
            for scale in self._scales(node):
                yield node, power + _is_sum(node) + scale
            return
        linearity, source = operator_of(node).linearity, self._values[node].source
        if linearity in SCALING:
            yield from self._scaled(node, power, seen)
        elif linearity in KEEPING or linearity is Linearity.PRODUCT:
            for each in node.all_input_nodes:
                yield from self._reduced(each, power, seen)
        elif power not in (self._is_added, 1.0) and ValueSource.STATE in source and ValueSource.BATCH not in source:
            yield node, power

    def _scaled(self, node: fx.Node, power: float, seen: set[Any]) -> Iterator[tuple[fx.Node, float]]:
        is_quotient = operator_of(node).linearity is Linearity.DIVIDE
        for value, scale in [node.args[:2], *([] if is_quotient else [node.args[1::-1]])]:
            by = self._power(scale)
            if by is not None:
                yield from self._reduced(value, power - by if is_quotient else power + by, seen)

    def _scales(self, node: fx.Node) -> set[float]:
        """Returns the powers of the batch size that scale the terms of what a node adds up of samples."""

        def terms(last: fx.Node) -> Iterable[fx.Node]:
            is_through = last is node or last.target is getitem or operator_of(last).linearity in KEEPING | SCALING
            return filter(self._grows, last.all_input_nodes) if is_through else ()

        found: dict[fx.Node, set[float]] = {}

        def powers_of(factor: Any) -> set[float]:
            return found.get(factor, {0.0}) if self._grows(factor) else {self._power(factor) or 0.0}

        for term in sorted(reached([node], terms)):
            linearity = operator_of(term).linearity
            if linearity in SCALING:
                first, second = map(powers_of, term.args[:2])
                sign = -1.0 if linearity is Linearity.DIVIDE else 1.0
                made = {one + sign * other for one in first for other in second}
                found[term] = {math.nan if math.isnan(each) else each for each in made}  # one object, not many
            else:
                found[term] = set().union(*(found[each] for each in term.all_input_nodes if each in found)) or {0.0}
        return found[node]

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
        return None if ValueSource.BATCH in self._values[scale].source else 0.0

    def _power_of(self, number: Any) -> float:
        first, *others = (float(self._sizes.number(number, size)) for size in _SIZES)
        if first == 0.0 or not all(first * other > 0.0 for other in others):
            return math.nan
        powers = [math.log(other / first, size) for other, size in zip(others, _SIZES[1:], strict=True)]
        nearest = float(round(powers[0]))
        return nearest if all(math.isclose(each, nearest, abs_tol=1e-6) for each in powers) else math.nan


def _is_sum(node: fx.Node) -> bool:
    kept = _kept(node)
    return adds_up(node) if kept is None else kept.adds_up


def _kept(node: fx.Node) -> OpaqueModule | None:
    """Returns the module that is kept whole of which a node is a result."""
    return opaque_module_of(node.args[0]) if node.target is getitem else None  # type: ignore[arg-type]
