"""Computes the loads of devices from the definition, for plans that are already made, and as nodes move."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autovaruna.planner.partition.problem import PartitionProblem


def device_loads(problem: PartitionProblem, devices: Sequence[int], num_devices: int) -> tuple[float, ...]:
    """Returns the load of each device in seconds.

    Args:
        problem: the graph.
        devices: the device of each node, in the order of ``problem.nodes``.
        num_devices: the number of devices.
    """
    compute = [0.0] * num_devices
    crossing = [0.0] * num_devices
    touched = [{device} for device in devices]
    index = problem.index()
    for source, target in problem.edges:
        touched[index[source]].add(devices[index[target]])
    for node, device, touching in zip(problem.nodes, devices, touched, strict=True):
        compute[device] += node.seconds
        if len(touching) > 1:
            for other in touching:
                crossing[other] += node.crossing_seconds
    join = max if problem.border == "overlapped" else _add
    return tuple(join(a, b) for a, b in zip(compute, crossing, strict=True))


class RunningLoads:
    """Follows the loads of all devices while groups of nodes move.

    Attributes:
        devices: the device of each node.
    """

    def __init__(self, problem: PartitionProblem, devices: Sequence[int], num_devices: int) -> None:
        index = problem.index()
        self.devices = list(devices)
        self._problem = problem
        self._nets = [{position} for position in range(len(problem.nodes))]
        for source, target in problem.edges:
            self._nets[index[source]].add(index[target])
        self._nets_of: list[list[int]] = [[] for _ in problem.nodes]
        for net, held in enumerate(self._nets):
            for position in held:
                self._nets_of[position].append(net)
        self._compute, self._crossing, self._bytes = ([0.0] * num_devices for _ in range(3))
        for position in range(len(problem.nodes)):
            self._add_node(position, 1)
            self._add_net(position, 1)

    def move(self, group: Sequence[int], device: int) -> None:
        """Puts the nodes of a group on a device."""
        nets = {net for position in group for net in self._nets_of[position]}
        for net in nets:
            self._add_net(net, -1)
        for position in group:
            self._add_node(position, -1)
            self.devices[position] = device
            self._add_node(position, 1)
        for net in nets:
            self._add_net(net, 1)

    def rank_with(self, group: Sequence[int], device: int) -> tuple[float, float, float]:
        """Returns bytes above the limit, greatest load and sum of loads when the group is on a device; moves it."""
        self.move(group, device)
        limit = math.inf if self._problem.limit_bytes is None else self._problem.limit_bytes
        join = max if self._problem.border == "overlapped" else _add
        loads = [join(a, b) for a, b in zip(self._compute, self._crossing, strict=True)]
        return sum(max(used - limit, 0.0) for used in self._bytes), max(loads), sum(loads)

    def _add_node(self, position: int, sign: int) -> None:
        node, device = self._problem.nodes[position], self.devices[position]
        self._compute[device] += sign * node.seconds
        self._bytes[device] += sign * node.num_bytes

    def _add_net(self, net: int, sign: int) -> None:
        touched = {self.devices[position] for position in self._nets[net]}
        if len(touched) > 1:
            for device in touched:
                self._crossing[device] += sign * self._problem.nodes[net].crossing_seconds


def _add(compute: float, crossing: float) -> float:
    return compute + crossing
