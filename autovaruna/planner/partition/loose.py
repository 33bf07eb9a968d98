"""Deals with loose blocks: backward-only ones, which no edge orders, so that each of them doubles the downsets.

They may be dropped for a lower bound, and put back into a chain found without them.

Dropping block v. Let e_1, e_2, ... be its nets without v itself, the dearest first, and U_t the union of the first t.
Take any device. If it holds v, it pays every e_i that it does not hold all of; if not, every e_i that it holds some
of. Where U_t is cut at the device, each case has at least one such e_i among the first t. So the nets U_t with
``seconds(e_t) - seconds(e_t+1)`` never cost a device more than the nets of v did, and without v, with these nets in
place of its own, every chain's loads are the same or less.
"""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.planner.partition.blocks import BlockGraph, bits
from autovaruna.planner.partition.load import device_loads
from autovaruna.planner.partition.problem import PartitionProblem

_ROUNDS = 3


def loose_blocks(graph: BlockGraph) -> list[int]:
    """Lists the blocks that no edge orders, if there are other ones; those with the smallest seconds first."""
    ordered = {block for edge in graph.edges for block in edge}
    loose = [block for block in range(len(graph)) if block not in ordered]
    weight = list(graph.seconds)
    for net, seconds in graph.nets:
        for block in bits(net):
            weight[block] += seconds
    return sorted(loose, key=lambda block: weight[block])


def drop_blocks(graph: BlockGraph, blocks: Sequence[int]) -> BlockGraph:
    """Drops loose blocks, so that no chain's loads grow."""
    nets = dict(graph.nets)
    for block in blocks:
        nets = _drop_from_nets(nets, 1 << block)
    kept = [block for block in range(len(graph)) if block not in set(blocks)]
    place = {old: new for new, old in enumerate(kept)}
    return BlockGraph(
        members=tuple(graph.members[block] for block in kept),
        seconds=tuple(graph.seconds[block] for block in kept),
        num_bytes=tuple(graph.num_bytes[block] for block in kept),
        edges=frozenset((place[a], place[b]) for a, b in graph.edges),
        nets=tuple(sorted((sum(1 << place[block] for block in bits(net)), seconds) for net, seconds in nets.items())),
    )


def _drop_from_nets(nets: dict[int, float], itself: int) -> dict[int, float]:
    kept = {net: seconds for net, seconds in nets.items() if not net & itself}
    dropped = sorted(((seconds, net & ~itself) for net, seconds in nets.items() if net & itself), reverse=True)
    union = 0
    for rank, (seconds, others) in enumerate(dropped):
        union |= others
        step = seconds - (dropped[rank + 1][0] if rank + 1 < len(dropped) else 0.0)
        if step > 0 and union & (union - 1):
            kept[union] = kept.get(union, 0.0) + step
    return kept


def place_loose(
    problem: PartitionProblem, devices: list[int], groups: Sequence[Sequence[int]], num_devices: int
) -> list[int]:
    """Puts groups of nodes that nothing orders on the devices where the greatest load is smallest, one at a time.

    Args:
        problem: the graph.
        devices: the device of each node; -1 for the nodes of `groups`.
        groups: positions in ``problem.nodes`` of nodes that stay together.
        num_devices: number of devices.
    """
    devices = [max(device, 0) for device in devices]
    for _ in range(_ROUNDS):
        before = list(devices)
        for group in groups:
            devices = min(
                (_moved(devices, group, device) for device in range(num_devices)),
                key=lambda candidate: _rank(problem, candidate, num_devices),
            )
        if devices == before:
            break
    return devices


def fits(problem: PartitionProblem, devices: Sequence[int], num_devices: int) -> bool:
    """Tells whether every device keeps the memory limit."""
    if problem.limit_bytes is None:
        return True
    used = [0] * num_devices
    for node, device in zip(problem.nodes, devices, strict=True):
        used[device] += node.num_bytes
    return max(used) <= problem.limit_bytes


def _moved(devices: list[int], group: Sequence[int], device: int) -> list[int]:
    moved = list(devices)
    for position in group:
        moved[position] = device
    return moved


def _rank(problem: PartitionProblem, devices: list[int], num_devices: int) -> tuple[bool, float, float]:
    loads = device_loads(problem, devices, num_devices)
    return not fits(problem, devices, num_devices), max(loads), sum(loads)
