"""Closes in on the optimum of graphs with too many downsets, looking only at cuts where little crosses.

If no load exceeds T, all loads together are at most k T, and the blocks take most of that. What is left bounds what may
cross at all boundaries together. So a cut matters only if its price leaves room for the least price of every other
boundary (see `shares`), and such cuts are few when T is close to what is proven.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.bounds import Bounds, chain_load
from autovaruna.planner.partition.few_cuts import FewCuts
from autovaruna.planner.partition.hunt import Hunt
from autovaruna.planner.partition.resources import resources_of

_log = logging.getLogger(__name__)
_SHARE_OF_TIME = 0.6


def squeeze(
    graph: BlockGraph,
    bounds: Bounds,
    proof: str,
    most_states: int,
    loose: Sequence[Sequence[int]] = (),
    until: float = math.inf,
) -> None:
    """Raises the bound, and offers the plans that it meets, by halving what lies between them.

    Args:
        graph: blocks whose every chain costs no more than in the problem.
        bounds: what is known, a plan among it; updated.
        proof: how a bound found here is proved.
        most_states: downsets under way at once in a listing.
        loose: groups of nodes that are not in the graph.
        until: the search ends about then, on ``time.monotonic``'s clock.
    """
    until = min(until, bounds.deadline)
    if bounds.num_devices < 2 or not graph.nets or math.isinf(bounds.upper):
        return
    resources = resources_of(graph, bounds.problem.border, bounds.problem.limit_bytes)
    few = FewCuts(graph, resources, bounds.num_devices, most_states, _spare_seconds(graph, bounds, loose))
    hunt = Hunt(bounds)
    while time.monotonic() < until and (step := hunt.next_step()) is not None:
        begin = time.monotonic()
        load, is_for_proof = step
        answer = few.decide(load, is_for_proof, begin + _SHARE_OF_TIME * (until - begin))
        verdict = "unknown" if not answer.is_exact else answer.chain is not None
        _log.debug("squeezing: load %g: %s, %.2f seconds", load, verdict, time.monotonic() - begin)
        if answer.chain is not None:
            bounds.offer(graph, answer.chain, loose)
            hunt.found(chain_load(graph, answer.chain, bounds.problem.border))
        elif answer.is_exact:
            hunt.refuted(load)
            bounds.raise_lower(min(hunt.low, bounds.upper), proof)
        else:
            hunt.gave_up(load)


def _spare_seconds(graph: BlockGraph, bounds: Bounds, loose: Sequence[Sequence[int]]) -> float:
    """Returns the seconds of loose nodes that no block of the graph took over."""
    if bounds.problem.border == "overlapped":
        return 0.0  # crossings share no room with them
    nodes = bounds.problem.nodes
    held, left = (
        sum(nodes[position].seconds for group in groups for position in group) for groups in (graph.members, loose)
    )
    return max(0.0, left - (sum(graph.seconds) - held))
