"""Holds each rule that joins blocks, and the dropping of loose ones, against every split."""

from __future__ import annotations

import math

import pytest

from autovaruna.planner.partition.blocks import BlockGraph, build_blocks
from autovaruna.planner.partition.contract import contract, join_heavy, join_light
from autovaruna.planner.partition.loose import drop_blocks, loose_blocks
from autovaruna.planner.partition.problem import Border, PartitionNode, PartitionProblem
from tests.planner_partition.brute_force import optimum, random_problem

_SEEDS = range(1000, 1060)
_BORDERS: tuple[Border, ...] = ("added", "overlapped")


def _as_problem(graph: BlockGraph, like: PartitionProblem) -> PartitionProblem:
    """Writes blocks as nodes again, and each net as a backward node of its first block without seconds."""
    names = [f"b{block}" for block in range(len(graph))]
    blocks = [
        PartitionNode(name, seconds, num_bytes=size, group=name)
        for name, seconds, size in zip(names, graph.seconds, graph.num_bytes, strict=True)
    ]
    loose = {names[block] for block in loose_blocks(graph)}
    blocks = [PartitionNode(b.name, b.seconds, 0.0, b.num_bytes, b.name in loose, b.group) for b in blocks]
    edges = [(names[a], names[b]) for a, b in graph.edges]
    for position, (net, seconds) in enumerate(graph.nets):
        held = [names[block] for block in range(len(graph)) if net >> block & 1]
        blocks.append(PartitionNode(f"net{position}", 0.0, seconds, is_backward=True, group=held[0]))
        edges += [(f"net{position}", name) for name in held[1:]]
    return PartitionProblem(tuple(blocks), tuple(edges), like.border, like.limit_bytes)


@pytest.mark.parametrize("border", _BORDERS)
@pytest.mark.parametrize("rule", ["blocks", "light", "heavy", "both"])
def test_joining_blocks_keeps_the_optimum(rule: str, border: Border) -> None:
    num_joined = 0
    for seed in _SEEDS:
        problem, num_devices = random_problem(seed, border, most_nodes=7)
        best = optimum(problem, num_devices)
        needs_bytes = problem.limit_bytes is not None
        graph = build_blocks(problem)
        below = best * (1 + 1e-9) + 1e-12
        joined = {
            "blocks": lambda g=graph: g,
            "light": lambda g=graph, n=needs_bytes: join_light(g, border, n),
            "heavy": lambda g=graph, b=below: join_heavy(g, border, b),
            "both": lambda g=graph, n=needs_bytes, b=below: contract(g, border, n, b),
        }[rule]()
        num_joined += len(graph) - len(joined)
        assert optimum(_as_problem(joined, problem), num_devices) == pytest.approx(best, rel=1e-9), seed
    assert num_joined > 0 or rule == "blocks"


def test_nothing_is_better_than_a_plan_if_heavy_blocks_part() -> None:
    """Below the optimum nothing exists, so rule "heavy" may join whatever it likes but must not make a better plan."""
    for seed in _SEEDS:
        problem, num_devices = random_problem(seed, most_nodes=7)
        best = optimum(problem, num_devices)
        if math.isinf(best):
            continue
        joined = join_heavy(build_blocks(problem), "added", 0.9 * best)
        assert optimum(_as_problem(joined, problem), num_devices) >= best * (1 - 1e-9), seed


@pytest.mark.parametrize("border", _BORDERS)
def test_dropping_loose_blocks_never_makes_plans_dearer(border: Border) -> None:
    num_dropped = 0
    for seed in range(2000, 2150):
        problem, num_devices = random_problem(seed, border, most_nodes=7)
        graph = build_blocks(problem)
        loose = loose_blocks(graph)
        if not loose or len(loose) == len(graph):
            continue
        num_dropped += len(loose)
        smaller = _as_problem(drop_blocks(graph, loose, border), problem)
        assert optimum(smaller, num_devices) <= optimum(problem, num_devices) * (1 + 1e-9), seed
    assert num_dropped > 50


def test_dropping_a_star_keeps_its_weight_and_its_cuts() -> None:
    """A sum of gradients between three blocks: its second goes to one of them, its nets become pairs."""
    graph = BlockGraph(
        members=((0,), (1,), (2,), (3,)),
        seconds=(1.0, 1.0, 1.0, 0.5),
        num_bytes=(0, 0, 0, 0),
        edges=frozenset({(0, 1), (1, 2)}),
        nets=((0b1001, 4.0), (0b1010, 4.0), (0b1100, 4.0)),
    )
    dropped = drop_blocks(graph, [3], "added")
    assert dropped.seconds == (1.0, 1.0, 1.5)
    assert dict(dropped.nets) == pytest.approx({0b011: 0.5 + 1.75, 0b101: 1.75, 0b110: 1.75})
