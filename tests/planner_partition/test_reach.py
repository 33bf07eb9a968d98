"""Holds decisions, the rule between cuts, and bounds against every chain."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autovaruna.planner.partition.blocks import BlockGraph, bits, build_blocks
from autovaruna.planner.partition.bounds import chain_load
from autovaruna.planner.partition.chains import cut_order, topological_orders
from autovaruna.planner.partition.cuts import Cuts
from autovaruna.planner.partition.full_reach import FullReach
from autovaruna.planner.partition.lattice import list_downsets
from autovaruna.planner.partition.problem import Border, PartitionProblem
from autovaruna.planner.partition.remaining import remaining_after
from autovaruna.planner.partition.resources import Resources, resources_of
from autovaruna.planner.partition.words import unpack
from tests.planner_partition.brute_force import optimum, random_problem
from tests.planner_partition.graphs import branches, chain_problem, forward_problem, grid, training_problem


def _reach(problem: PartitionProblem, num_devices: int) -> FullReach:
    graph = build_blocks(problem)
    levels = list_downsets(graph, 100_000)
    assert levels is not None
    return FullReach(graph, levels, resources_of(graph, problem.border, problem.limit_bytes), num_devices)


@pytest.mark.parametrize("border", ["added", "overlapped"])
def test_a_chain_exists_from_the_optimum_on(border: Border) -> None:
    for seed in range(3000, 3100):
        problem, num_devices = random_problem(seed, border, most_nodes=7)
        reach = _reach(problem, num_devices)
        best = optimum(problem, num_devices)
        if math.isinf(best):
            assert reach.decide(math.inf).chain is None, seed
            continue
        answer = reach.decide(best)
        assert answer.chain is not None and answer.is_exact, seed
        assert chain_load(build_blocks(problem), answer.chain, border) <= best * (1 + 1e-9), seed
        assert best == 0 or reach.decide(best * (1 - 1e-6)).chain is None, seed


@pytest.mark.parametrize("border", ["added", "overlapped"])
def test_a_cut_that_is_beaten_is_never_the_only_way(border: Border) -> None:
    """Rule "further": where D can be completed on some devices, so can the cut that one step of the rule leads to."""
    num_beaten = 0
    for seed in range(3200, 3300):
        problem, num_devices = random_problem(seed, border, most_nodes=7)
        graph = build_blocks(problem)
        levels = list_downsets(graph, 1000)
        assert levels is not None
        resources = resources_of(graph, problem.border, problem.limit_bytes)
        cuts = Cuts.of_levels(levels, resources)
        downsets = [unpack(row) for row in cuts.downsets]
        for row, further in enumerate(downsets):
            target = np.arange(len(cuts)) == row
            for source in np.flatnonzero(cuts.beaten(target)):
                if (further & ~downsets[source]).bit_count() > 1:
                    continue
                num_beaten += 1
                before, after = (_least_rest(graph, resources, D, num_devices) for D in (downsets[source], further))
                assert after <= before * (1 + 1e-9) + 1e-12, seed
    assert num_beaten > 300


def _least_rest(graph: BlockGraph, resources: Resources, cut: int, num_devices: int) -> float:
    """Tries all ways to split what is outside a cut, by brute force over chains of downsets."""
    downsets = [d for d in range(1 << len(graph)) if all(d >> a & 1 or not d >> b & 1 for a, b in graph.edges)]
    least = {cut: 0.0}
    for _ in range(num_devices):
        least = {
            end: min(max(least[start], _load(graph, resources, end & ~start)) for start in least if start & ~end == 0)
            for end in downsets
            if end & cut == cut
        }
    return least[(1 << len(graph)) - 1]


def _load(graph: BlockGraph, resources: Resources, held: int) -> float:
    cut = sum(seconds for net, seconds in graph.nets if net & held and net & ~held)
    used = [
        sum(row[block] for block in bits(held)) + crossing * cut
        for row, crossing in zip(resources.use, resources.crossing, strict=True)
    ]
    seconds = [figure for figure, counts in zip(used, resources.is_seconds, strict=True) if counts]
    fits = all(
        figure <= resources.limit_bytes for figure, counts in zip(used, resources.is_seconds, strict=True) if not counts
    )
    return max(seconds) if fits else math.inf


def test_late_decisions_prove_nothing() -> None:
    answer = _reach(forward_problem(*grid(3, 3)), 2).decide(9.0, deadline=0.0)
    assert answer.chain is None and not answer.is_exact


def test_tables_are_not_laid_out_when_time_is_over() -> None:
    graph = build_blocks(forward_problem(*grid(3, 3)))
    levels, resources = list_downsets(graph, 1000), resources_of(graph, "added", None)
    assert levels is not None
    with pytest.raises(TimeoutError):
        FullReach(graph, levels, resources, 2, deadline=0.0)
    with pytest.raises(TimeoutError):
        Cuts.of_list(graph, levels[1].downsets, resources, deadline=0.0)
    with pytest.raises(TimeoutError):
        remaining_after(levels, resources.use[0], 5.0, deadline=0.0)


def test_remaining_devices_are_the_fewest() -> None:
    problem = forward_problem(*branches(2, 2), crossing=0.0)
    graph = build_blocks(problem)
    levels = list_downsets(graph, 1000)
    assert levels is not None
    for limit in (2.0, 3.0, 5.0):
        rest = remaining_after(levels, np.array(graph.seconds), limit)
        for level, remaining in zip(levels, rest, strict=True):
            for row, downset in enumerate(level.downsets):
                inside = {graph.members[block][0] for block in bits(int(downset[0]))}
                left = _without(problem, {problem.nodes[position].name for position in inside})
                devices = int(remaining.devices[row])
                assert optimum(left, devices) <= limit
                assert devices == 0 or optimum(left, devices - 1) > limit


def _without(problem: PartitionProblem, names: set[str]) -> PartitionProblem:
    nodes = tuple(node for node in problem.nodes if node.name not in names)
    return PartitionProblem(nodes, tuple(edge for edge in problem.edges if not names & set(edge)))


@pytest.mark.parametrize("border", ["added", "overlapped"])
def test_cutting_an_order_is_the_best_of_all_cuts(border: Border) -> None:
    problem = training_problem(*grid(2, 4), seed=3, crossing=2.0)
    problem = PartitionProblem(problem.nodes, problem.edges, border, problem.total_bytes() // 2)
    graph = build_blocks(problem)
    size = len(graph)
    for order in topological_orders(graph):
        load, ends = cut_order(graph, order, resources_of(graph, border, problem.limit_bytes), 3)
        best = math.inf
        for cuts in itertools.combinations_with_replacement(range(size + 1), 2):
            chain = tuple(sum(1 << block for block in order[:end]) for end in (*cuts, size))
            held = [after & ~before for before, after in zip((0, *chain), chain, strict=False)]
            sizes = [sum(graph.num_bytes[b] for b in range(size) if mask >> b & 1) for mask in held]
            if max(sizes) <= (problem.limit_bytes or 0):
                best = min(best, chain_load(graph, chain, border))
        assert load == pytest.approx(best)
        assert ends[-1] == size


def test_a_run_that_holds_a_whole_net_does_not_pay_it() -> None:
    graph = build_blocks(chain_problem([1.0, 1.0, 1.0]))
    assert cut_order(graph, [0, 1, 2], resources_of(graph, "added", None), 1) == (3.0, [3])
    assert cut_order(graph, [0, 1, 2], resources_of(graph, "added", None), 2)[0] == 3.0
