"""Deals with loose blocks: backward-only ones, which no edge orders, so that each of them doubles the downsets.

They may be dropped for a lower bound, and put back into a chain found without them.

Dropping block v. Write e_1, e_2, ... for its nets without v itself. A device with v pays ``seconds(v)`` and every e_i
that it does not hold all of; a device without v pays every e_i that it holds some of. So without v no chain's loads
are greater than with it if, for it and its nets, we charge less:
1. To a device that holds block u of e_1, d = min(seconds(v), seconds(e_1)): with v it pays this as seconds(v), without
   v as a part of e_1, of which only the rest is left. So u takes over d seconds.
2. Of what is left, let the first t nets be those with at least c seconds. A layer of thickness s that all of them
   have costs s times the number of them that are cut by the rule above, call it n. For each pair i, j < t the net
   e_i + e_j is cut at the device only if e_i or e_j is so counted: at most n (t - 1) pairs. So all these pairs may
   cost s / (t - 1) each. (Where t is large, the union of all nets, cut only if n > 0, may cost s.)
Bytes of v are left out.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence

from autovaruna.planner.partition.blocks import BlockGraph, bits, join_blocks
from autovaruna.planner.partition.load import RunningLoads
from autovaruna.planner.partition.problem import Border, PartitionProblem

_ROUNDS = 3
_MOST_PAIRED = 6


def loose_blocks(graph: BlockGraph) -> list[int]:
    """Lists the blocks that no edge orders, if there are other ones; those with the smallest seconds first."""
    ordered = {block for edge in graph.edges for block in edge}
    loose = [block for block in range(len(graph)) if block not in ordered]
    weight = list(graph.seconds)
    for net, seconds in graph.nets:
        for block in bits(net):
            weight[block] += seconds
    return sorted(loose, key=lambda block: weight[block])


def without_loose(graph: BlockGraph, border: Border) -> tuple[BlockGraph, list[tuple[int, ...]]]:
    """Returns the graph without loose blocks, if others are left, and the nodes of these."""
    loose = loose_blocks(graph)
    if not loose or len(loose) == len(graph):
        return graph, []
    return drop_blocks(graph, loose, border), [graph.members[block] for block in loose]


def drop_blocks(graph: BlockGraph, blocks: Sequence[int], border: Border) -> BlockGraph:
    """Drops loose blocks, so that no chain's loads grow."""
    nets, seconds = dict(graph.nets), list(graph.seconds)
    for block in blocks:
        nets, taker, taken = _drop_from_nets(nets, block, seconds[block] if border == "added" else 0.0)
        seconds[taker] += taken
    kept = [block for block in range(len(graph)) if block not in set(blocks)]
    place = {old: new for new, old in enumerate(kept)}
    return BlockGraph(
        members=tuple(graph.members[block] for block in kept),
        seconds=tuple(seconds[block] for block in kept),
        num_bytes=tuple(graph.num_bytes[block] for block in kept),
        edges=frozenset((place[a], place[b]) for a, b in graph.edges),
        nets=tuple(sorted((sum(1 << place[block] for block in bits(net)), cost) for net, cost in nets.items())),
    )


def _drop_from_nets(nets: dict[int, float], block: int, seconds: float) -> tuple[dict[int, float], int, float]:
    """Returns the nets without a block, the block that takes over some of its seconds, and how many."""
    itself = 1 << block
    kept = {net: cost for net, cost in nets.items() if not net & itself}
    left = sorted(((cost, net & ~itself) for net, cost in nets.items() if net & itself), reverse=True)
    if not left:
        return kept, block, 0.0
    cost, others = left[0]
    taken = min(cost, seconds)
    left = sorted([(cost - taken, others), *left[1:]], reverse=True)
    for count, (cost, _) in enumerate(left, start=1):
        step = cost - (left[count][0] if count < len(left) else 0.0)
        for net, share in _layer([others for _, others in left[:count]]):
            if step > 0 and net & (net - 1):
                kept[net] = kept.get(net, 0.0) + step * share
    return kept, others.bit_length() - 1, taken


def _layer(nets: list[int]) -> list[tuple[int, float]]:
    """Returns the nets that stand for a layer, and the share of its thickness that each costs."""
    if 1 < len(nets) <= _MOST_PAIRED:
        return [(a | b, 1.0 / (len(nets) - 1)) for a, b in itertools.combinations(nets, 2)]
    return [(functools.reduce(operator.or_, nets), 1.0)]


def still_dropped(graph: BlockGraph, devices: Sequence[int], dropped: Sequence[int], most: int) -> list[int]:
    """Returns the dropped blocks that may stay so: all but `most` of those with the dearest nets that a plan cuts.

    Args:
        graph: the blocks.
        devices: the device of each node in the plan; empty if there is none.
        dropped: the blocks, those with the smallest seconds first.
        most: how many blocks may come back, at least 1.
    """
    cost = dict.fromkeys(dropped, 0.0)
    on = [devices[members[0]] for members in graph.members] if devices else list(range(len(graph)))
    for net, seconds in graph.nets:
        if len({on[block] for block in bits(net)}) > 1:
            for block in cost.keys() & set(bits(net)):
                cost[block] += seconds
    dearest = sorted(dropped, key=lambda block: cost[block])
    back = set(dearest[-most:])
    cut = {block for block in back if cost[block] > 0}
    return [block for block in dropped if block not in (cut or back)]


def settle(graph: BlockGraph, devices: Sequence[int], dropped: Sequence[int]) -> BlockGraph:
    """Joins dropped blocks with the neighbour on their device of a plan that shares the dearest net with them."""
    on = [devices[members[0]] for members in graph.members]
    labels = list(range(len(graph)))
    for block in dropped:
        nets = sorted(((seconds, net) for net, seconds in graph.nets if net >> block & 1), reverse=True)
        near = [other for _, net in nets for other in bits(net) if on[other] == on[block] and other not in dropped]
        labels[block] = near[0] if near else block
    return join_blocks(graph, labels)


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
    running = RunningLoads(problem, [max(device, 0) for device in devices], num_devices)
    for _ in range(_ROUNDS):
        before = list(running.devices)
        for group in groups:
            running.move(group, min(range(num_devices), key=lambda device: running.rank_with(group, device)))
        if running.devices == before:
            break
    return running.devices


def fits(problem: PartitionProblem, devices: Sequence[int], num_devices: int) -> bool:
    """Tells whether every device keeps the memory limit."""
    if problem.limit_bytes is None:
        return True
    used = [0] * num_devices
    for node, device in zip(problem.nodes, devices, strict=True):
        used[device] += node.num_bytes
    return max(used) <= problem.limit_bytes
