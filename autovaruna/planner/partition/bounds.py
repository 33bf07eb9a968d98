"""Keeps the best plan found and the best bound proven, until they meet or time is over."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.load import device_loads
from autovaruna.planner.partition.loose import fits, place_loose
from autovaruna.planner.partition.problem import Partition, PartitionProblem
from autovaruna.planner.partition.reach import Chain


@dataclass
class Bounds:
    """What is known so far.

    Attributes:
        problem: the graph.
        num_devices: how many devices there are.
        tolerance: bound and plan have met when they differ by no more than this share.
        deadline: the end of the search, on ``time.monotonic``'s clock.
        devices: the device of each node in the best plan; ``None`` as long as there is none.
        tried: the device of each node in the plan offered last, good or not.
        upper: the greatest load of the best plan.
        lower: no plan has a smaller greatest load.
        proof: how `lower` was proved.
        num_downsets: the most downsets looked at in one search.
    """

    problem: PartitionProblem
    num_devices: int
    tolerance: float
    deadline: float
    devices: list[int] | None = None
    tried: list[int] = field(default_factory=list)
    upper: float = math.inf
    lower: float = 0.0
    proof: str = "loads are not negative"
    num_downsets: int = 0

    @property
    def target(self) -> float:
        """The greatest load that would be an improvement worth the name."""
        return self.upper * (1.0 - self.tolerance)

    @property
    def is_closed(self) -> bool:
        """Whether nothing is left to find."""
        return self.lower >= self.target and self.devices is not None

    @property
    def is_impossible(self) -> bool:
        """Whether it is proven that there is no plan at all."""
        return math.isinf(self.lower)

    @property
    def gap(self) -> float:
        """By what share the best plan may be worse than the optimum."""
        return self.upper / self.lower - 1.0 if 0 < self.lower < math.inf else math.inf

    @property
    def is_late(self) -> bool:
        """Whether time is over."""
        return time.monotonic() > self.deadline

    def raise_lower(self, bound: float, proof: str) -> None:
        """Notes a proven bound."""
        if bound > self.lower:
            self.lower, self.proof = bound, proof

    def offer(self, graph: BlockGraph, chain: Chain, loose: Sequence[Sequence[int]] = ()) -> bool:
        """Notes a plan if it fits and is the best so far, and tells whether it is.

        Args:
            graph: the blocks that the chain splits.
            chain: the growing downsets at which devices end.
            loose: groups of nodes that are not in `graph`.
        """
        return self._offer(place_nodes(graph, chain, len(self.problem.nodes)), loose)

    def offer_anywhere(self, loose: Sequence[Sequence[int]]) -> bool:
        """Notes a plan for groups of nodes that nothing orders, if there are no others; heavy ones first is best."""
        devices, seconds = [0] * len(self.problem.nodes), [0.0] * self.num_devices
        for group in loose:
            device = seconds.index(min(seconds))
            seconds[device] += sum(self.problem.nodes[position].seconds for position in group)
            for position in group:
                devices[position] = device
        return self._offer(devices, loose)

    def offer_split(self, split: Partition) -> bool:
        """Notes a plan for the same nodes, made with other costs."""
        devices = split.assignment
        return self._offer([devices[node.name] for node in self.problem.nodes], ())

    def _offer(self, devices: list[int], loose: Sequence[Sequence[int]]) -> bool:
        if loose:
            devices = place_loose(self.problem, devices, loose, self.num_devices)
        self.tried = devices
        load = max(device_loads(self.problem, devices, self.num_devices))
        if load >= self.upper or not fits(self.problem, devices, self.num_devices):
            return False
        self.devices, self.upper = devices, load
        return True


def place_nodes(graph: BlockGraph, chain: Chain, num_nodes: int) -> list[int]:
    """Returns the device of each node, -1 for nodes that are in no block."""
    devices = [-1] * num_nodes
    for block, members in enumerate(graph.members):
        device = next(index for index, downset in enumerate(chain) if downset >> block & 1)
        for position in members:
            devices[position] = device
    return devices


def chain_load(graph: BlockGraph, chain: Chain, border: str) -> float:
    """Returns the greatest load of a chain, by blocks and nets."""
    worst, before = 0.0, 0
    for downset in chain:
        held = downset & ~before
        compute = sum(seconds for block, seconds in enumerate(graph.seconds) if held >> block & 1)
        crossing = sum(seconds for net, seconds in graph.nets if net & held and net & ~held)
        worst = max(worst, compute + crossing if border == "added" else max(compute, crossing))
        before = downset
    return worst
