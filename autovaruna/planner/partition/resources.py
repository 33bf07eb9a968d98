"""Says what a device may hold: one row of figures for each thing that is limited."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.problem import Border
from autovaruna.planner.partition.words import Floats

_ROUNDING = 1e-10


@dataclass(frozen=True, slots=True)
class Resources:
    """What the blocks and the nets of a device use of each limited thing; the first is compute seconds.

    A device that holds S uses ``sum(use[r, b] for b in S) + crossing[r] * cut(S)`` of resource r.

    Attributes:
        use: shape (resources, blocks).
        crossing: 1 where cut nets count, else 0; shape (resources,).
        is_seconds: whether the limit is the load, else it is memory; shape (resources,).
        limit_bytes: the limit of memory.
    """

    use: Floats
    crossing: Floats
    is_seconds: tuple[bool, ...]
    limit_bytes: float

    @property
    def has_memory(self) -> bool:
        """Whether memory is limited."""
        return not all(self.is_seconds)

    def limits(self, load: float) -> Floats:
        """Returns the limit of each resource, a rounding error wider, when no device may exceed `load`."""
        load *= 1.0 + _ROUNDING
        return np.array([load if seconds else self.limit_bytes for seconds in self.is_seconds])


def resources_of(graph: BlockGraph, border: Border, limit_bytes: int | None) -> Resources:
    """Lists the resources of a problem; leaves memory out when everything fits on one device."""
    seconds, nothing = list(graph.seconds), [0.0] * len(graph)
    rows = [(seconds, 1.0, True)] if border == "added" else [(seconds, 0.0, True), (nothing, 1.0, True)]
    if limit_bytes is not None and sum(graph.num_bytes) > limit_bytes:
        rows.append(([float(size) for size in graph.num_bytes], 0.0, False))
    return Resources(
        use=np.array([row[0] for row in rows], dtype=np.float64).reshape(len(rows), len(graph)),
        crossing=np.array([row[1] for row in rows]),
        is_seconds=tuple(row[2] for row in rows),
        limit_bytes=float(limit_bytes or 0),
    )
