"""Finds the optimum by trying every split, straight from the definition; and draws random problems."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from autovaruna.planner.partition import Border, PartitionNode, PartitionProblem

Groups = list[list[int]]


def groups_of(problem: PartitionProblem) -> Groups:
    """Lists the nodes that stay together."""
    groups: dict[object, list[int]] = {}
    for position, node in enumerate(problem.nodes):
        groups.setdefault(node.group if node.group is not None else (position,), []).append(position)
    return list(groups.values())


def splits(problem: PartitionProblem, num_devices: int) -> Iterator[list[int]]:
    """Yields every valid split: the device of each node."""
    groups = groups_of(problem)
    for choice in itertools.product(range(num_devices), repeat=len(groups)):
        devices = [0] * len(problem.nodes)
        for group, device in zip(groups, choice, strict=True):
            for position in group:
                devices[position] = device
        if is_valid(problem, devices):
            yield devices


def is_valid(problem: PartitionProblem, devices: list[int]) -> bool:
    """Tells whether data flows one way along the devices, groups stay together, and memory suffices."""
    index = problem.index()
    for source, target in ((index[a], index[b]) for a, b in problem.edges):
        is_forward = not problem.nodes[source].is_backward and not problem.nodes[target].is_backward
        if is_forward and devices[source] > devices[target]:
            return False
    if any(len({devices[position] for position in group}) > 1 for group in groups_of(problem)):
        return False
    limit = math.inf if problem.limit_bytes is None else problem.limit_bytes
    return all(
        sum(node.num_bytes for node, held in zip(problem.nodes, devices, strict=True) if held == device) <= limit
        for device in set(devices)
    )


def greatest_load(problem: PartitionProblem, devices: list[int]) -> float:
    """Returns the greatest load of any device."""
    index = problem.index()
    worst = 0.0
    for device in set(devices):
        held = {node.name for node, on in zip(problem.nodes, devices, strict=True) if on == device}
        compute = sum(node.seconds for node in problem.nodes if node.name in held)
        crossing = {a for a, b in problem.edges if (a in held) != (b in held)}
        seconds = sum(problem.nodes[index[name]].crossing_seconds for name in crossing)
        worst = max(worst, compute + seconds if problem.border == "added" else max(compute, seconds))
    return worst


def optimum(problem: PartitionProblem, num_devices: int) -> float:
    """Returns the smallest greatest load, infinite if no split is valid."""
    return min((greatest_load(problem, devices) for devices in splits(problem, num_devices)), default=math.inf)


def random_problem(seed: int, border: Border = "added", most_nodes: int = 10) -> tuple[PartitionProblem, int]:
    """Draws a problem with groups, backward nodes and, half the time, a memory limit."""
    draw = random.Random(seed)
    size = draw.randint(1, most_nodes)
    num_backward = draw.choice([0, 0, size // 4, size // 2])
    scale = draw.choice([0.05, 0.5, 3.0])
    colours = draw.choice([0, 2, size])
    nodes = tuple(
        PartitionNode(
            name=f"n{position}",
            seconds=draw.choice([0.0, draw.randint(1, 9), draw.uniform(0, 9)]),
            crossing_seconds=scale * draw.choice([0.0, 1.0, draw.uniform(0, 9)]),
            num_bytes=draw.choice([0, draw.randint(1, 9)]),
            is_backward=position >= size - num_backward,
            group=f"g{draw.randrange(colours)}" if colours and draw.random() < 0.6 else None,
        )
        for position in range(size)
    )
    density = draw.choice([0.15, 0.3, 0.5])
    edges = tuple(
        (nodes[a].name, nodes[b].name) for a in range(size) for b in range(a + 1, size) if draw.random() < density
    )
    total = sum(node.num_bytes for node in nodes)
    limit = draw.choice([None, int(total * draw.uniform(0.3, 1.0))])
    return PartitionProblem(nodes, edges, border, limit), draw.randint(1, 3)
