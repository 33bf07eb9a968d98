"""Computes the load of a device straight from the definition, for plans that are already made."""

from __future__ import annotations

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


def _add(compute: float, crossing: float) -> float:
    return compute + crossing
