"""Draws limits on cuts, and says from the definition which downsets keep them."""

from __future__ import annotations

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph, bits
from autovaruna.planner.partition.cut_limits import CutLimits


def downsets(graph: BlockGraph) -> list[int]:
    """Lists all downsets, as masks."""
    return [mask for mask in range(1 << len(graph)) if all(mask >> a & 1 or not mask >> b & 1 for a, b in graph.edges)]


def random_limits(graph: BlockGraph, totals: np.ndarray, draw: np.random.Generator) -> CutLimits:
    """Draws limits that some downsets keep."""
    prices = draw.uniform(0, 2, len(graph.nets)) * draw.integers(0, 2, len(graph.nets))
    return CutLimits(
        prices=prices,
        shares=draw.uniform(-1, 1, len(graph.nets)),
        most_price=draw.uniform(0, 1) * prices.sum(),
        before=draw.uniform(0.3, 1.2) * totals,
        after=draw.uniform(0.3, 1.2) * totals,
        most_before=draw.uniform(0.5, 1.2) * totals,
        most_after=draw.uniform(0.5, 1.2) * totals,
    )


def is_within(
    graph: BlockGraph, use: np.ndarray, crossing: np.ndarray, limits: CutLimits, mask: int, rounding: float = 0.0
) -> bool:
    """Says what `CutLimits` says, straight from its words."""
    wide = rounding * (1.0 + use.sum(axis=1))
    is_open = np.array([bool(net & mask and net & ~mask) for net, _ in graph.nets], dtype=bool)
    price, share = float(limits.prices[is_open].sum()), float(limits.shares[is_open].sum())
    used = use[:, list(bits(mask))].sum(axis=1)
    rest = use.sum(axis=1) - used
    return bool(
        price <= limits.most_price + wide.max()
        and (used <= limits.most_before + wide).all()
        and (rest <= limits.most_after + wide).all()
        and (used + crossing * share <= limits.before + wide).all()
        and (rest + crossing * (price - share) <= limits.after + wide).all()
    )
