"""Defines what is to be partitioned, `PartitionProblem`, and the answer, `Partition`: plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autovaruna.errors import PlanError

Border = Literal["added", "overlapped"]


@dataclass(frozen=True, slots=True)
class PartitionNode:
    """One node of the graph.

    Attributes:
        name: unique in the problem.
        seconds: time of the node on its device.
        crossing_seconds: time to move its output over a device's border; paid once by every device whose border the
            output crosses, in either direction.
        num_bytes: memory the node takes on its device.
        is_backward: whether the node lies in the backward pass, whose order follows from the forward pass.
        group: nodes of one group stay on one device; ``None`` for a group of its own.
    """

    name: str
    seconds: float
    crossing_seconds: float = 0.0
    num_bytes: int = 0
    is_backward: bool = False
    group: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    """A graph to split into a chain of devices.

    The forward nodes of each device are the difference of two downsets of the forward graph, so data flows one way
    along the chain. A backward node goes where its group goes; a group with no forward node goes anywhere.

    Attributes:
        nodes: in any order.
        edges: (name of the source, name of the destination).
        border: how the load of a device joins its compute and what crosses its border: "added" is their sum,
            "overlapped" the greater of the two.
        limit_bytes: memory of a device; ``None`` for no limit.

    Raises:
        PlanError: a name appears twice, an edge ends at no node, or a time, size or limit is negative or not finite.
    """

    nodes: tuple[PartitionNode, ...]
    edges: tuple[tuple[str, str], ...]
    border: Border = "added"
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        names = {node.name for node in self.nodes}
        if len(names) < len(self.nodes):
            raise PlanError(f"got {len(self.nodes)} nodes with {len(names)} names; give each node its own name")
        for node in self.nodes:
            _check_node(node)
        if not math.isfinite(sum(node.seconds + node.crossing_seconds for node in self.nodes)):
            raise PlanError("the seconds of all nodes together are no finite number; give them in a larger unit")
        if self.limit_bytes is not None and self.limit_bytes < 0:
            raise PlanError(f"got limit_bytes={self.limit_bytes}; expected 0 or more")
        for edge in self.edges:
            _check_edge(edge, names)
        if self.border not in ("added", "overlapped"):
            raise PlanError(f"got border={self.border!r}; expected 'added' or 'overlapped'")

    def index(self) -> dict[str, int]:
        """Returns the position of each node by its name."""
        return {node.name: position for position, node in enumerate(self.nodes)}

    def total_bytes(self) -> int:
        """Returns the memory that all nodes take together."""
        return sum(node.num_bytes for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Partition:
    """A split of a problem's nodes over a chain of devices.

    Attributes:
        stages: the names of each device's nodes, first device first; devices that stay empty are left out.
        loads: the load of each of them, in seconds.
        lower_bound: no split over as many devices has a smaller greatest load.
        proof: how the bound was proved, in one sentence.
        num_downsets: downsets of the contracted graph that were looked at.
    """

    stages: tuple[tuple[str, ...], ...]
    loads: tuple[float, ...]
    lower_bound: float
    proof: str
    num_downsets: int = 0

    @property
    def objective(self) -> float:
        """The greatest load, in seconds."""
        return max(self.loads, default=0.0)

    @property
    def gap(self) -> float:
        """How far the objective may lie above the optimum: ``objective / lower_bound - 1``."""
        if self.objective <= self.lower_bound:
            return 0.0
        return self.objective / self.lower_bound - 1.0 if self.lower_bound > 0 else math.inf

    @property
    def assignment(self) -> Mapping[str, int]:
        """The device of each node, by name."""
        return {name: device for device, names in enumerate(self.stages) for name in names}


def _check_node(node: PartitionNode) -> None:
    figures = (node.seconds, node.crossing_seconds, node.num_bytes)
    if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
        raise PlanError(
            f"node {node.name!r} has seconds={node.seconds}, crossing_seconds={node.crossing_seconds}, "
            f"num_bytes={node.num_bytes}; expected finite figures of at least 0: measure the node again"
        )


def _check_edge(edge: tuple[str, str], names: set[str]) -> None:
    for name in edge:
        if name not in names:
            raise PlanError(f"edge {edge!r} ends at {name!r}, which is no node; add the node or drop the edge")
