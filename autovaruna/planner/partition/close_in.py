"""Closes in on the least greatest load of one block graph, by deciding limits between what is proven and found."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.bounds import Bounds, chain_load
from autovaruna.planner.partition.decide import Decider
from autovaruna.planner.partition.lattice import count, list_downsets
from autovaruna.planner.partition.resources import resources_of

_log = logging.getLogger(__name__)
_FEW_LABELS, _MANY_LABELS = 8, 512
_COMPUTE_STEPS = 40


def close_in(
    graph: BlockGraph, bounds: Bounds, proof: str | None, max_downsets: int, loose: Sequence[Sequence[int]] = ()
) -> bool:
    """Searches all downsets of a graph; raises the bound and offers the plans that it meets.

    Args:
        graph: blocks whose every chain costs no more than in the problem (then `proof` says why) or no less.
        bounds: what is known; updated.
        proof: how a bound found here is proved; ``None`` if the graph proves nothing about the problem.
        max_downsets: the search is not begun with more downsets.
        loose: groups of nodes that are not in the graph.

    Returns:
        Whether the search was begun.
    """
    levels = list_downsets(graph, max_downsets)
    if levels is None:
        return False
    num_downsets = count(levels)
    bounds.num_downsets = max(bounds.num_downsets, num_downsets)
    resources = resources_of(graph, bounds.problem.border, bounds.problem.limit_bytes)
    search = _Search(graph, Decider(graph, levels, resources, bounds.num_devices), bounds, proof, loose)
    _log.debug("closing in: %d blocks, %d downsets, bounds %g to %g", len(graph), num_downsets, search.low, search.high)
    search.run()
    return True


class _Search:
    """Bisection between `low`, below which this graph has no chain, and `high`, where it has one or none is wanted."""

    def __init__(
        self, graph: BlockGraph, decider: Decider, bounds: Bounds, proof: str | None, loose: Sequence[Sequence[int]]
    ) -> None:
        self._graph, self._decider, self._bounds = graph, decider, bounds
        self._proof, self._loose = proof, loose
        self._labels = _FEW_LABELS
        self._is_stuck = False
        self.low = bounds.lower if proof is not None else 0.0
        self.high = bounds.upper

    def run(self) -> None:
        """Closes in until both ends meet, labels no longer suffice, or time is over."""
        if not self._find_any():
            return
        self._try_top()
        if not self._is_closed:
            self._raise(self._compute_bound())
        while not self._is_over:
            self._try((self.low + self.high) / 2)
            if not self._is_over:
                self._try_top()

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._is_stuck or self._bounds.is_late

    @property
    def _is_closed(self) -> bool:
        return self.low >= self.high * (1.0 - self._bounds.tolerance)

    def _find_any(self) -> bool:
        """Makes `high` finite, or tells that memory allows no chain at all."""
        if math.isfinite(self.high):
            return True
        answer = self._decider.decide(math.inf, _MANY_LABELS, self._bounds.deadline)
        if answer.chain is None:
            if answer.is_exact:
                self._raise(math.inf)
            return False
        self._bounds.offer(self._graph, answer.chain, self._loose)
        self.high = chain_load(self._graph, answer.chain, self._bounds.problem.border)
        return True

    def _compute_bound(self) -> float:
        """Returns a limit below which even compute alone does not fit."""
        low, high = max(self.low, max(self._graph.seconds, default=0.0)), self.high
        if self._decider.may_exist(low):
            return low
        for _ in range(_COMPUTE_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._decider.may_exist(middle) else (middle, high)
        return low

    def _try_top(self) -> None:
        """Asks for anything better: often there is nothing, which ends the search."""
        self._try(self.high * (1.0 - self._bounds.tolerance))

    def _try(self, load: float) -> None:
        top = self.high * (1.0 - self._bounds.tolerance)
        load = min(load, top)
        answer = self._decider.decide(load, self._labels, self._bounds.deadline)
        if answer.chain is None:
            if answer.is_exact:
                self._raise(self.high if load >= top else load)
            return
        self._bounds.offer(self._graph, answer.chain, self._loose)
        found = chain_load(self._graph, answer.chain, self._bounds.problem.border)
        if answer.is_exact or found <= load:
            self.high = min(self.high, found)
        elif self._labels < _MANY_LABELS:
            self._labels *= 4
        else:
            self._is_stuck = True

    def _raise(self, bound: float) -> None:
        self.low = max(self.low, bound)
        if self._proof is not None:
            self._bounds.raise_lower(min(self.low, self._bounds.upper), self._proof)
