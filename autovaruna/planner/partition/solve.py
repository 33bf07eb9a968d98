"""Partitions a graph: contracts it, finds a good chain, and closes in on the optimum from both sides."""

from __future__ import annotations

import math
import time

from autovaruna.errors import PlanError
from autovaruna.planner.partition.anneal import anneal
from autovaruna.planner.partition.blocks import BlockGraph, build_blocks
from autovaruna.planner.partition.bounds import Bounds
from autovaruna.planner.partition.chains import best_chain
from autovaruna.planner.partition.close_in import close_in
from autovaruna.planner.partition.contract import contract
from autovaruna.planner.partition.lattice import list_downsets
from autovaruna.planner.partition.lighten import search_lightened
from autovaruna.planner.partition.load import device_loads
from autovaruna.planner.partition.loose import drop_blocks, loose_blocks, settle, still_dropped, without_loose
from autovaruna.planner.partition.problem import Partition, PartitionNode, PartitionProblem
from autovaruna.planner.partition.refine import refine
from autovaruna.planner.partition.resources import resources_of
from autovaruna.planner.partition.squeeze import squeeze

_SMALL, _LARGE = 20_000, 200_000
_EFFORTS = ((20_000, 0.3), (1_500_000, 0.9))
_SHARE_FOR_BYTES = 0.25
_SHARE_TO_ANNEAL, _SHARE_TO_REFINE = 0.1, 0.2
_NEGLIGIBLE = 1e-6
_FEW_LOOSE = 4
_MOST_BACK = 2


def partition(
    problem: PartitionProblem,
    num_devices: int,
    *,
    tolerance: float = 1e-9,
    max_seconds: float = 40.0,
    max_downsets: int = 1_000_000,
) -> Partition:
    """Splits a graph over a chain of devices so that the greatest load is smallest.

    The search is exact: it ends when plan and bound meet. If time or downsets run out first, the best plan found comes
    with the best bound proven, and ``Partition.gap`` says how far apart they are.

    Args:
        problem: the graph, its costs and limits.
        num_devices: devices to use at most.
        tolerance: plan and bound have met when they differ by no more than this share.
        max_seconds: the search ends about then, whether they have met or not.
        max_downsets: the search does not list more downsets than this.

    Raises:
        PlanError: `num_devices` is below 1, or no split keeps the memory limit (or none was found in time).
    """
    if num_devices < 1:
        raise PlanError(f"got num_devices={num_devices}; expected at least 1")
    bounds = Bounds(problem, num_devices, tolerance, time.monotonic() + max_seconds)
    needs_bytes = problem.limit_bytes is not None and problem.total_bytes() > problem.limit_bytes
    graph = contract(build_blocks(problem), problem.border, needs_bytes, math.inf)
    _check_bytes(graph, bounds)
    resources = resources_of(graph, problem.border, problem.limit_bytes)
    chain = best_chain(graph, resources, num_devices)
    if chain is not None:
        bounds.offer(graph, chain)
    if len(loose := loose_blocks(graph)) == len(graph):
        bounds.offer_anywhere([graph.members[block] for block in reversed(loose)])
    bounds.raise_lower(sum(graph.seconds) / num_devices, "the seconds of all nodes, divided by the devices")
    bounds.raise_lower(max(graph.seconds, default=0.0), "the seconds of nodes that no better plan parts")
    _search(contract(graph, problem.border, needs_bytes, bounds.target), bounds, max_downsets)
    return _result(bounds)


def _search(graph: BlockGraph, bounds: Bounds, max_downsets: int) -> None:
    """Lists all downsets where they are few; else begins with those at which little crosses."""
    border = bounds.problem.border
    if list_downsets(without_loose(graph, border)[0], min(_LARGE, max_downsets), bounds.deadline) is None:
        if resources_of(graph, border, bounds.problem.limit_bytes).has_memory:
            search_lightened(graph, bounds, max_downsets)
        if not bounds.is_closed and not bounds.is_late:
            _search_wide(graph, bounds)
    if bounds.is_closed or bounds.is_late or _search_without_loose(graph, bounds, max_downsets):
        return
    if not bounds.is_closed and not close_in(graph, bounds, "all downsets were searched", max_downsets):
        refine(graph, bounds, _LARGE)


def _search_wide(graph: BlockGraph, bounds: Bounds) -> None:
    """Searches around the best plan, and the cuts at which little crosses.

    While there are loose blocks, few cuts first: most of them need not come back.
    """
    smaller, groups = without_loose(graph, bounds.problem.border)
    is_whole = len(groups) <= _FEW_LOOSE
    proof = "all cuts that leave room for what crosses at the others were searched"
    if bounds.devices is None and bounds.problem.limit_bytes is not None:
        bounds.offer_split(_split_bytes(bounds, _SHARE_FOR_BYTES * (bounds.deadline - time.monotonic())))
    anneal(graph, bounds, _share_of_rest(bounds, _SHARE_TO_ANNEAL))
    refine(graph, bounds, _SMALL, _share_of_rest(bounds, _SHARE_TO_REFINE))
    for most_states, share in _EFFORTS if groups else _EFFORTS[-1:]:
        squeeze(smaller, bounds, proof, most_states, groups, _share_of_rest(bounds, share))
        if is_whole:
            smaller, groups = graph, []
        if bounds.is_closed or bounds.is_late:
            return
        refine(graph, bounds, _SMALL, _share_of_rest(bounds, _SHARE_TO_REFINE))


def _share_of_rest(bounds: Bounds, share: float) -> float:
    """Returns when a share of the time that is left will be over."""
    now = time.monotonic()
    return now + share * (bounds.deadline - now)


def _search_without_loose(graph: BlockGraph, bounds: Bounds, max_downsets: int) -> bool:
    """Lets loose blocks in only where they matter; returns whether that closed the gap, but for a trifle."""
    loose = loose_blocks(graph)
    dropped = loose if len(loose) < len(graph) else []
    while dropped and not bounds.is_closed:
        proof = f"all downsets were searched, without {len(dropped)} loose backward blocks"
        groups = [graph.members[block] for block in dropped]
        smaller = drop_blocks(graph, dropped, bounds.problem.border)
        if not close_in(smaller, bounds, proof, max_downsets, groups) or bounds.is_late:
            break
        if not bounds.is_closed and bounds.devices is not None:
            close_in(settle(graph, bounds.devices, dropped), bounds, None, _SMALL)
        if bounds.gap <= _NEGLIGIBLE or bounds.is_impossible:
            break
        room = max_downsets // max(1, bounds.num_downsets)  # each block that comes back doubles the downsets
        if room < 2:
            break
        dropped = still_dropped(graph, bounds.tried, dropped, min(_MOST_BACK, room.bit_length() - 1))
    return bounds.is_closed or bounds.is_impossible or bounds.gap <= _NEGLIGIBLE * bool(loose)


def _check_bytes(graph: BlockGraph, bounds: Bounds) -> None:
    """Refuses what cannot fit however it is split."""
    limit, nodes = bounds.problem.limit_bytes, bounds.problem.nodes
    if limit is None:
        return
    for members, size in zip(graph.members, graph.num_bytes, strict=True):
        if size > limit:
            raise PlanError(
                f"{len(members)} nodes that stay together, among them {nodes[members[0]].name!r}, take {size} bytes "
                f"and a device holds {limit}: {size - limit} bytes are missing; part them, or raise the limit"
            )
    total, room = bounds.problem.total_bytes(), limit * bounds.num_devices
    if total > room:
        raise PlanError(
            f"the nodes take {total} bytes and {bounds.num_devices} devices of {limit} bytes hold {room}: "
            f"{total - room} bytes are missing; use {-(-total // limit)} devices or more"
        )


def _result(bounds: Bounds) -> Partition:
    if bounds.devices is None:
        raise PlanError(_what_would_fit(bounds))
    loads = device_loads(bounds.problem, bounds.devices, bounds.num_devices)
    stages: list[list[str]] = [[] for _ in loads]
    for node, device in zip(bounds.problem.nodes, bounds.devices, strict=True):
        stages[device].append(node.name)
    used = [device for device, names in enumerate(stages) if names]
    return Partition(
        stages=tuple(tuple(stages[device]) for device in used),
        loads=tuple(loads[device] for device in used),
        lower_bound=bounds.upper if bounds.is_closed else bounds.lower,
        proof=bounds.proof,
        num_downsets=bounds.num_downsets,
    )


def _what_would_fit(bounds: Bounds) -> str:
    """Says which memory limit would do."""
    problem, best = bounds.problem, _split_bytes(bounds, 10.0)
    device = max(range(len(best.loads)), key=lambda index: best.loads[index])
    verdict = "no split fits" if bounds.is_impossible else "no split that fits was found in time"
    return (
        f"{verdict} on {bounds.num_devices} devices of {problem.limit_bytes} bytes; the best split by memory puts "
        f"{best.objective:.0f} bytes on device {device}, where {best.objective - (problem.limit_bytes or 0):.0f} are "
        f"missing; raise the limit to {best.objective:.0f} bytes or use more devices"
    )


def _split_bytes(bounds: Bounds, max_seconds: float) -> Partition:
    """Splits the bytes of a problem as if they were seconds."""
    nodes = tuple(
        PartitionNode(node.name, float(node.num_bytes), is_backward=node.is_backward, group=node.group)
        for node in bounds.problem.nodes
    )
    return partition(PartitionProblem(nodes, bounds.problem.edges), bounds.num_devices, max_seconds=max_seconds)
