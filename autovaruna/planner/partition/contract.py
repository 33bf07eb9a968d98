"""Joins blocks that some optimal plan keeps together, by two rules.

Write S(b) for the device of block b, and call a net cut at a device when the device holds some of it but not all.
Both rules look at plans whose greatest load is below `below`, the load of a plan already found.

Rule "heavy". If p and q are apart, every net with both is cut at S(p) and at S(q). So if the seconds of these nets,
plus (border "added") the seconds of p or of q, reach `below`, no such plan parts p from q.

Rule "light". Take a block v without bytes that matter, and a block u with: every predecessor of v is u or precedes u;
every successor of v is u or follows u. Then v may move to S(u) without breaking the order. If they were apart, the
nets {u, v} were cut at both devices and are not any more; the nets with v but not u may become cut at the two, and
no other device pays more, since it holds the same of each net as before. So if
``seconds(v) + nets with v without u <= nets {u, v}``, no load grows, and some optimal plan keeps u and v together
(border "overlapped": the same with ``seconds(v) = 0``).
"""

from __future__ import annotations

from collections import defaultdict

from autovaruna.planner.partition.blocks import BlockGraph, bits, join_blocks
from autovaruna.planner.partition.problem import Border

_WIDEST_NET = 64


def contract(graph: BlockGraph, border: Border, needs_bytes: bool, below: float) -> BlockGraph:
    """Joins blocks by both rules until none applies.

    Args:
        graph: the blocks.
        border: how a device's load joins compute and communication.
        needs_bytes: whether a memory limit can bind.
        below: only plans with a greatest load below this matter; may be infinite.
    """
    while True:
        smaller = join_light(join_heavy(graph, border, below), border, needs_bytes)
        if len(smaller) == len(graph):
            return smaller
        graph = smaller


def join_heavy(graph: BlockGraph, border: Border, below: float) -> BlockGraph:
    """Applies rule "heavy" to all pairs at once."""
    labels = list(range(len(graph)))
    for (p, q), seconds in _affinity(graph).items():
        compute = max(graph.seconds[p], graph.seconds[q]) if border == "added" else 0.0
        if compute + seconds >= below:
            _union(labels, p, q)
    return join_blocks(graph, [_find(labels, block) for block in range(len(graph))])


def join_light(graph: BlockGraph, border: Border, needs_bytes: bool) -> BlockGraph:
    """Applies rule "light" to pairs of which none is touched twice.

    A join of other blocks never undoes the rule for (v, u) as long as v itself is joined with nothing else: nets only
    gain u or become {u, v}, and precedence stays. So a block that moved is not a goal, and a goal does not move.
    """
    labels = list(range(len(graph)))
    ancestors, descendants = closures(graph)
    nets_of = _nets_of(graph)
    goals: set[int] = set()
    for v in range(len(graph)):
        if v in goals or (needs_bytes and graph.num_bytes[v]) or (border == "overlapped" and graph.seconds[v]):
            continue
        goal = _light_goal(graph, v, nets_of[v], ancestors, descendants)
        if goal is not None and labels[goal] == goal:
            labels[v] = goal
            goals.add(goal)
    return join_blocks(graph, labels)


def _light_goal(
    graph: BlockGraph, v: int, nets: list[tuple[int, float]], ancestors: list[int], descendants: list[int]
) -> int | None:
    total = sum(seconds for _, seconds in nets)
    shared: dict[int, float] = defaultdict(float)
    only: dict[int, float] = defaultdict(float)
    for net, seconds in nets:
        others = net & ~(1 << v)
        for u in bits(others):
            shared[u] += seconds
        if others & (others - 1) == 0:
            only[others.bit_length() - 1] += seconds
    before, after = ancestors[v], descendants[v]
    for u in bits(before | after) if not nets else sorted(shared, key=lambda u: -only[u]):
        itself = 1 << u
        is_ordered = not before & ~(ancestors[u] | itself) and not after & ~(descendants[u] | itself)
        if is_ordered and graph.seconds[v] + total - shared[u] <= only[u]:
            return u
    return None


def _affinity(graph: BlockGraph) -> dict[tuple[int, int], float]:
    """Adds up, for pairs of blocks, the seconds of the nets that hold both; skips very wide nets."""
    pairs: dict[tuple[int, int], float] = defaultdict(float)
    for net, seconds in graph.nets:
        if net.bit_count() > _WIDEST_NET:
            continue
        blocks = list(bits(net))
        for position, p in enumerate(blocks):
            for q in blocks[position + 1 :]:
                pairs[p, q] += seconds
    return pairs


def _nets_of(graph: BlockGraph) -> list[list[tuple[int, float]]]:
    nets: list[list[tuple[int, float]]] = [[] for _ in range(len(graph))]
    for net, seconds in graph.nets:
        for block in bits(net):
            nets[block].append((net, seconds))
    return nets


def closures(graph: BlockGraph) -> tuple[list[int], list[int]]:
    """Returns each block's set of ancestors and of descendants."""
    ancestors, descendants = [0] * len(graph), [0] * len(graph)
    for a, b in sorted(graph.edges, key=lambda edge: edge[1]):
        ancestors[b] |= ancestors[a] | 1 << a
    for a, b in sorted(graph.edges, key=lambda edge: -edge[0]):
        descendants[a] |= descendants[b] | 1 << b
    return ancestors, descendants


def _find(labels: list[int], block: int) -> int:
    while labels[block] != block:
        labels[block] = labels[labels[block]]
        block = labels[block]
    return block


def _union(labels: list[int], p: int, q: int) -> None:
    labels[_find(labels, p)] = _find(labels, q)
