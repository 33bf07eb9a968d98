"""Closes in on the least greatest load of one block graph, by deciding limits between what is proven and found."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.bounds import Bounds, chain_load
from autovaruna.planner.partition.full_reach import FullReach
from autovaruna.planner.partition.lattice import count, list_downsets
from autovaruna.planner.partition.resources import resources_of

_log = logging.getLogger(__name__)
_NEAR = 0.01
_COARSE = 0.001


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
    levels = list_downsets(graph, max_downsets, bounds.deadline)
    if levels is None:
        return False
    num_downsets = count(levels)
    bounds.num_downsets = max(bounds.num_downsets, num_downsets)
    resources = resources_of(graph, bounds.problem.border, bounds.problem.limit_bytes)
    _log.debug("closing in: %d blocks, %d downsets, up to %g", len(graph), num_downsets, bounds.upper)
    with contextlib.suppress(TimeoutError):
        reach = FullReach(graph, levels, resources, bounds.num_devices, bounds.deadline)
        _Search(graph, reach, bounds, proof, loose).run()
    return True


class _Search:
    """Bisection between `low`, below which this graph has no chain, and `high`, where it has one or none is wanted."""

    def __init__(
        self, graph: BlockGraph, reach: FullReach, bounds: Bounds, proof: str | None, loose: Sequence[Sequence[int]]
    ) -> None:
        self._graph, self._reach, self._bounds = graph, reach, bounds
        self._proof, self._loose = proof, loose
        self.low = bounds.lower if proof is not None or not loose else 0.0
        self.high = bounds.upper

    def run(self) -> None:
        """Closes in until both ends meet or time is over: halves what lies between them until that is little."""
        if not self._find_any():
            return
        if not self._is_closed:
            self._raise(self._compute_bound())
        may_be_best = True  # a limit that only the plan found so far keeps is tried once, before halving goes on
        while not self._is_closed and not self._bounds.is_late:
            top, before = self.high * (1.0 - self._bounds.tolerance), self.high
            tries_top = may_be_best and self.high - self.low <= _NEAR * self.high
            self._try(top if tries_top else (self.low + top) / 2, top)
            may_be_best = not tries_top or self.high == before

    @property
    def _is_closed(self) -> bool:
        return self.low >= self.high * (1.0 - self._bounds.tolerance)

    def _find_any(self) -> bool:
        """Makes `high` finite, or tells that memory allows no chain at all."""
        if math.isfinite(self.high):
            return True
        answer = self._reach.decide(math.inf, self._bounds.deadline)
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
        if self._reach.may_exist(low):
            return low
        while high - low > _COARSE * high and not self._bounds.is_late:
            middle = (low + high) / 2
            low, high = (low, middle) if self._reach.may_exist(middle) else (middle, high)
        return low

    def _try(self, load: float, top: float) -> None:
        """Decides a limit; `top` is the greatest one whose plans would be worth the name."""
        answer = self._reach.decide(load, self._bounds.deadline)
        if answer.chain is not None:
            self._bounds.offer(self._graph, answer.chain, self._loose)
            self.high = min(self.high, chain_load(self._graph, answer.chain, self._bounds.problem.border))
        elif answer.is_exact:
            self._raise(self.high if load >= top else load)

    def _raise(self, bound: float) -> None:
        self.low = max(self.low, bound)
        if self._proof is not None:
            self._bounds.raise_lower(min(self.low, self._bounds.upper), self._proof)
