"""Tells what a caller sees: the plan, its bound, its errors, and what happens when graphs are wide."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest

from autovaruna.errors import PlanError
from autovaruna.planner.partition import Partition, PartitionNode, PartitionProblem, partition, solve
from autovaruna.planner.partition.blocks import build_blocks
from autovaruna.planner.partition.bounds import Bounds
from tests.planner_partition.brute_force import greatest_load, is_valid
from tests.planner_partition.graphs import branches, chain_problem, forward_problem, grid, training_problem


def _assert_valid(problem: PartitionProblem, found: Partition) -> None:
    devices = [found.assignment[node.name] for node in problem.nodes]
    assert is_valid(problem, devices)
    assert found.objective == pytest.approx(greatest_load(problem, devices))
    assert found.lower_bound <= found.objective


def test_a_chain_is_cut_in_the_middle() -> None:
    found = partition(chain_problem([1.0, 2.0, 3.0, 6.0]), 2)
    assert found.stages == (("n0", "n1", "n2"), ("n3",))
    assert found.loads == (7.0, 7.0)
    assert found.lower_bound == 7.0
    assert found.assignment["n3"] == 1


def test_overlapped_borders_cost_nothing_under_compute() -> None:
    assert partition(chain_problem([3.0, 3.0], "overlapped"), 2).objective == 3.0
    assert partition(chain_problem([0.4, 0.4], "overlapped"), 2).objective == 0.8


def test_fewer_devices_are_used_where_that_is_better() -> None:
    found = partition(chain_problem([0.3, 0.3, 0.3]), 3)
    assert found.stages == (("n0", "n1", "n2"),)
    assert found.gap == 0.0


def test_memory_forces_dearer_cuts() -> None:
    assert len(partition(chain_problem([0.3] * 4, limit_bytes=20), 4).stages) == 2


def test_backward_nodes_follow_their_group() -> None:
    problem = training_problem(*grid(2, 3))
    found = partition(problem, 2)
    _assert_valid(problem, found)
    assert all(found.assignment[f"n{i}f"] == found.assignment[f"n{i}b"] for i in range(6))


def test_groups_on_a_cycle_stay_together() -> None:
    nodes = tuple(PartitionNode(name, 1.0, group=group) for name, group in zip("abcd", "xyyx", strict=True))
    found = partition(PartitionProblem(nodes, (("a", "b"), ("c", "d"))), 2)
    assert found.objective == 4.0


def test_a_value_is_paid_once_by_each_device_that_it_reaches() -> None:
    nodes = (PartitionNode("a", 5.0, 1.0), *(PartitionNode(f"b{i}", 2.5) for i in range(2)))
    found = partition(PartitionProblem(nodes, (("a", "b0"), ("a", "b1"))), 2)
    assert found.loads == (6.0, 6.0)


def test_nothing_to_split() -> None:
    found = partition(PartitionProblem((), ()), 3)
    assert found.stages == () and found.objective == 0.0 and found.gap == 0.0


def test_nodes_without_seconds() -> None:
    assert partition(chain_problem([0.0, 0.0]), 2).objective == 0.0


@pytest.mark.parametrize(
    ("shape", "num_devices"), [(branches(4, 9), 6), (grid(6, 8), 4), (branches(2, 40), 3), (grid(3, 40), 8)]
)
def test_wide_graphs_are_solved(shape: tuple[int, list[tuple[int, int]]], num_devices: int) -> None:
    problem = training_problem(*shape, seed=1)
    found = partition(problem, num_devices, max_seconds=500.0)
    _assert_valid(problem, found)
    assert found.gap == 0.0
    assert found.num_downsets > 500


def count_looks(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Lets the clock go on whenever somebody looks at it, so that no machine is too slow."""
    looks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: seconds * next(looks))


def test_too_many_downsets_leave_a_plan_with_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    count_looks(monkeypatch, 0.01)
    problem = forward_problem(*branches(8, 9))
    found = partition(problem, 4, max_seconds=5.0, max_downsets=20_000)
    _assert_valid(problem, found)
    assert 0.0 <= found.gap < 0.03


def test_a_search_ends_in_time_with_a_bound() -> None:
    problem = training_problem(*grid(7, 9), seed=2, crossing=3.0)
    found = partition(problem, 5, max_seconds=0.0)
    _assert_valid(problem, found)
    assert math.isfinite(found.gap)


def test_a_gap_without_a_bound_is_infinite() -> None:
    assert math.isinf(Partition((("a",),), (1.0,), 0.0, "").gap)


@pytest.mark.parametrize(
    ("limit_bytes", "num_devices", "words"),
    [
        (9, 9, "'n0', take 10 bytes and a device holds 9: 1 bytes are missing"),
        (10, 3, "10 bytes are missing; use 4 devices"),
    ],
)
def test_what_cannot_fit_is_named(limit_bytes: int, num_devices: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        partition(chain_problem([1.0] * 4, limit_bytes=limit_bytes), num_devices)


def test_order_can_forbid_what_bytes_allow() -> None:
    """Sizes 6, 1, 6, 1, 6 fill two devices of 10 bytes only out of order."""
    nodes = tuple(PartitionNode(f"n{i}", 1.0, num_bytes=size) for i, size in enumerate((6, 1, 6, 1, 6)))
    edges = tuple((f"n{i}", f"n{i + 1}") for i in range(4))
    with pytest.raises(PlanError, match=r"no split fits on 2 devices of 10 bytes.*raise the limit to 13 bytes"):
        partition(PartitionProblem(nodes, edges, limit_bytes=10), 2)


def _with_sums(problem: PartitionProblem, sources: list[int]) -> PartitionProblem:
    """Adds backward nodes that nothing orders: the sum of the gradients that the followers of a node send back."""
    sums = tuple(PartitionNode(f"s{i}", 0.1, 0.4, 2, is_backward=True) for i in sources)
    followers = {i: [b[:-1] for a, b in problem.edges if a == f"n{i}f"] for i in sources}
    edges = [(f"{follower}b", f"s{i}") for i in sources for follower in followers[i]]
    edges += [(f"s{i}", f"n{i}b") for i in sources]
    return PartitionProblem(problem.nodes + sums, problem.edges + tuple(edges), limit_bytes=problem.limit_bytes)


@pytest.mark.parametrize("num_devices", [2, 3, 5])
def test_loose_nodes_do_not_multiply_downsets(num_devices: int) -> None:
    problem = _with_sums(training_problem(*grid(2, 30), seed=4, crossing=0.4), list(range(0, 58, 3)))
    found = partition(problem, num_devices)
    _assert_valid(problem, found)
    assert found.gap < 1e-6
    assert found.num_downsets < 100_000


def test_loose_nodes_come_back_few_at_a_time() -> None:
    """Memory places these sums, so that many of their nets are cut; two of them make the bound, and four times 25."""
    chain = training_problem(24, [(i, i + 1) for i in range(23)], seed=3, crossing=0.5)
    sums = tuple(PartitionNode(f"sum{i}", 0.3, 0.4, 6 + 3 * i, is_backward=True) for i in range(8))
    edges = [pair for i in range(8) for pair in ((f"n{3 * i}b", f"sum{i}"), (f"sum{i}", f"n{3 * i + 2}b"))]
    found = partition(PartitionProblem(chain.nodes + sums, chain.edges + tuple(edges), limit_bytes=80), 6)
    assert found.gap == 0.0
    assert found.num_downsets == 100


def test_crossings_that_cost_as_much_as_compute_are_solved() -> None:
    """Three parallel chains between two nodes, again and again, as in attention: a cut inside costs thrice."""
    shape = branches(3, 3)
    size, edges = 8 * (shape[0] - 1) + 1, []
    for at in range(0, size - 1, shape[0] - 1):
        edges += [(at + a, at + b) for a, b in shape[1]]
    for num_devices in (3, 6):
        problem = forward_problem(size, edges, seed=5, crossing=3.0)
        found = partition(problem, num_devices)
        _assert_valid(problem, found)
        assert found.gap == 0.0


def test_loose_nodes_do_not_hide_that_nothing_fits() -> None:
    chain = training_problem(3, [(0, 1), (1, 2)])
    nodes = tuple(replace(node, num_bytes=6) for node in chain.nodes)
    problem = _with_sums(PartitionProblem(nodes, chain.edges, limit_bytes=20), [0])
    with pytest.raises(PlanError, match="no split fits on 2 devices of 20 bytes"):
        partition(problem, 2)


@pytest.mark.parametrize(
    ("nodes", "edges", "words"),
    [
        ((PartitionNode("a", 1.0), PartitionNode("a", 1.0)), (), "own name"),
        ((PartitionNode("a", -1.0),), (), "seconds=-1.0"),
        ((PartitionNode("a", math.nan),), (), "measure the node again"),
        ((PartitionNode("a", 1.0),), (("a", "b"),), "'b', which is no node"),
    ],
)
def test_bad_problems_are_refused(
    nodes: tuple[PartitionNode, ...], edges: tuple[tuple[str, str], ...], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        PartitionProblem(nodes, edges)


def test_a_device_is_needed() -> None:
    with pytest.raises(PlanError, match="num_devices=0"):
        partition(chain_problem([1.0]), 0)


def test_an_unknown_border_is_refused() -> None:
    with pytest.raises(PlanError, match="'added' or 'overlapped'"):
        PartitionProblem((), (), border="none")  # type: ignore[arg-type]


def test_nodes_without_edges_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    count_looks(monkeypatch, 0.1)
    problem = PartitionProblem(tuple(PartitionNode(f"n{i}", 1.0 + i % 7 / 4) for i in range(40)), ())
    found = partition(problem, 4, max_seconds=2.0)
    _assert_valid(problem, found)
    assert found.gap < 0.01


def test_a_wide_graph_that_hardly_fits_is_split_by_its_bytes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = forward_problem(*grid(3, 5), seed=1)
    nodes = tuple(PartitionNode(node.name, float(node.num_bytes)) for node in problem.nodes)
    least = partition(PartitionProblem(nodes, problem.edges), 4).objective
    tight = replace(problem, limit_bytes=int(least))
    for search in ("anneal", "refine", "squeeze"):
        monkeypatch.setattr(solve, search, lambda *_: None)
    bounds = Bounds(tight, 4, 1e-9, time.monotonic() + 20.0)
    solve._search_wide(build_blocks(tight), bounds)
    assert bounds.devices is not None and is_valid(tight, bounds.devices)
