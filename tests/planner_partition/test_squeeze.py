"""Holds the search of cheap cuts, and every bound it rests on, against every downset and every split."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from autovaruna.planner.partition import partition, solve
from autovaruna.planner.partition.blocks import bits, build_blocks, turn
from autovaruna.planner.partition.bounds import Bounds, chain_load
from autovaruna.planner.partition.cheap import CheapCuts
from autovaruna.planner.partition.cut_limits import CutLimits
from autovaruna.planner.partition.cuts import Cuts
from autovaruna.planner.partition.few_cuts import FewCuts
from autovaruna.planner.partition.lattice import list_downsets
from autovaruna.planner.partition.loose import drop_blocks, loose_blocks
from autovaruna.planner.partition.problem import Border
from autovaruna.planner.partition.reach import Answer
from autovaruna.planner.partition.resources import resources_of
from autovaruna.planner.partition.shares import Shares
from autovaruna.planner.partition.squeeze import squeeze
from autovaruna.planner.partition.words import unpack
from tests.planner_partition.brute_force import greatest_load, optimum, random_problem, splits
from tests.planner_partition.cut_cases import downsets, is_within, random_limits
from tests.planner_partition.graphs import branches, forward_problem, grid, training_problem

_BORDERS: tuple[Border, ...] = ("added", "overlapped")
_MANY = 100_000


@pytest.mark.parametrize("border", _BORDERS)
def test_exactly_the_downsets_within_limits_are_listed(border: Border) -> None:
    draw, num_listed = np.random.default_rng(0), 0
    for seed in range(5000, 5120):
        problem = random_problem(seed, border, most_nodes=8)[0]
        graph = build_blocks(problem)
        resources = resources_of(graph, border, problem.limit_bytes)
        limits = random_limits(graph, resources.use.sum(axis=1) + 1e-3, draw)
        listed = CheapCuts(graph, resources).within(limits, _MANY)
        assert listed is not None
        masks = [unpack(row) for row in listed.downsets]
        wanted = [m for m in downsets(graph) if is_within(graph, resources.use, resources.crossing, limits, m)]
        assert sorted(masks) == wanted, seed
        num_listed += len(masks)
    assert num_listed > 150


def test_listed_figures_are_those_of_thedownsets() -> None:
    graph = build_blocks(training_problem(*grid(2, 4), seed=1))
    resources = resources_of(graph, "added", None)
    nets = np.ones(len(graph.nets))
    wide = np.full(1, math.inf)
    listed = CheapCuts(graph, resources).within(CutLimits(2 * nets, nets, math.inf, wide, wide, wide, wide), _MANY)
    assert listed is not None and len(listed) == 15
    for row, use, price, share in zip(listed.downsets, listed.use[0], listed.price, listed.share, strict=True):
        mask = unpack(row)
        num_open = sum(bool(net & mask and net & ~mask) for net, _ in graph.nets)
        assert (price, share) == (2 * num_open, num_open)
        assert use == pytest.approx(sum(graph.seconds[block] for block in bits(mask)))


def test_a_listing_that_grows_too_much_is_given_up_or_thinned() -> None:
    graph = build_blocks(forward_problem(*branches(3, 4)))
    resources = resources_of(graph, "added", None)
    wide = np.full(1, math.inf)
    nets = np.ones(len(graph.nets))
    limits = CutLimits(nets, nets, math.inf, wide, wide, wide, wide)
    cheap = CheapCuts(graph, resources)
    assert cheap.within(limits, 126) is None
    assert cheap.within(limits, 1000, deadline=0.0) is None
    cuts, is_complete = cheap.cheapest(limits, 50)
    assert len(cuts) == 50 and not is_complete
    assert {unpack(row) for row in cuts.downsets} <= set(downsets(graph))


def test_cuts_of_a_list_are_those_of_alldownsets() -> None:
    for seed in range(5200, 5230):
        problem = random_problem(seed, most_nodes=7)[0]
        graph = build_blocks(problem)
        resources = resources_of(graph, "added", None)
        levels = list_downsets(graph, 1000)
        assert levels is not None
        full = Cuts.of_levels(levels, resources)
        shuffled = np.random.default_rng(seed).permutation(len(full))
        listed, which = Cuts.of_list(graph, full.downsets[np.concatenate([shuffled, shuffled])], resources)
        assert len(listed) == len(full)
        place = which[: len(full)]
        assert np.array_equal(place, which[len(full) :])
        assert np.array_equal(listed.downsets[place], full.downsets[shuffled])
        assert np.array_equal(listed.open_nets[place], full.open_nets[shuffled])
        assert listed.border[place] == pytest.approx(full.border[shuffled])
        reached = np.random.default_rng(seed).random(len(full)) < 0.3
        assert np.array_equal(listed.beaten(_moved(reached[shuffled], place))[place], full.beaten(reached)[shuffled])


def _moved(figures: np.ndarray, place: np.ndarray) -> np.ndarray:
    moved = np.zeros_like(figures)
    moved[place] = figures
    return moved


def test_no_split_pays_less_than_the_shares_say() -> None:
    """The three sums in the words of `shares`: all devices, those up to a boundary, and those after it."""
    num_checked = 0
    for seed in range(5300, 5340):
        problem = random_problem(seed, most_nodes=6)[0]
        graph = build_blocks(problem)
        draw = np.random.default_rng(seed)
        shares = Shares(graph, 2)
        shares.shares = draw.dirichlet([0.5, 0.5], len(graph.nets)).T.reshape(2, len(graph.nets))
        for devices in splits(replace(problem, limit_bytes=None), 3):
            on = [devices[members[0]] for members in graph.members]
            touched = [{on[block] for block in bits(net)} for net, _ in graph.nets]
            paid = [
                sum(cost for at, (_, cost) in zip(touched, graph.nets, strict=True) if len(at) > 1 and device in at)
                for device in range(3)
            ]
            is_open = np.array([[min(at) <= j < max(at) for at in touched] for j in range(2)]).reshape(2, -1)
            price = [float(shares.prices(j) @ is_open[j]) for j in range(2)]
            side = [float(shares.sides(j) @ is_open[j]) for j in range(2)]
            assert sum(paid) >= sum(price) - 1e-9, seed
            for j in range(2):
                assert sum(paid[: j + 1]) >= side[j] + sum(price[:j]) - 1e-9, seed
                assert sum(paid[j + 1 :]) >= price[j] - side[j] + sum(price[j + 1 :]) - 1e-9, seed
            num_checked += 1
    assert num_checked > 500


@pytest.mark.parametrize("border", _BORDERS)
@pytest.mark.parametrize("most_states", [6, _MANY])
def test_a_chain_is_found_from_the_optimum_on_and_never_refuted(border: Border, most_states: int) -> None:
    num_refuted = 0
    for seed in range(5400, 5460):
        problem, num_devices = random_problem(seed, border, most_nodes=7)
        num_devices += 1
        graph = build_blocks(problem)
        best = optimum(problem, num_devices)
        if math.isinf(best) or not graph.nets:
            continue
        resources = resources_of(graph, border, problem.limit_bytes)
        few = FewCuts(graph, resources, num_devices, most_states)
        below = few.decide(best * (1 - 1e-6))
        assert best == 0 or below.chain is None, seed
        assert below.is_exact or most_states < _MANY
        num_refuted += below.is_exact
        answer = few.decide(best)
        assert answer.chain is not None or (most_states < _MANY and not answer.is_exact), seed
        if answer.chain is not None:
            assert chain_load(graph, answer.chain, border) <= best * (1 + 1e-9), seed
    assert num_refuted > 10


@pytest.mark.parametrize("is_wide_first", [True, False])
def test_chains_are_found_from_either_end(is_wide_first: bool) -> None:
    """Four branches that become one chain, or one that becomes four: there are fewer cuts where it is narrow."""
    edges = [(i, i + 4) for i in range(8)] + [(i, 12) for i in range(8, 12)] + [(i, i + 1) for i in range(12, 19)]
    if not is_wide_first:
        edges = [(19 - b, 19 - a) for a, b in edges]
    problem = forward_problem(20, edges, seed=6, crossing=0.5)
    graph, best = build_blocks(problem), partition(problem, 4)
    few = FewCuts(graph, resources_of(graph, "added", None), 4, _MANY)
    assert few.decide(best.objective * (1 - 1e-6)) == Answer(None, True)
    answer = few.decide(best.objective)
    assert answer.chain is not None and answer.chain[-1] == (1 << 20) - 1
    assert chain_load(graph, answer.chain, "added") <= best.objective * (1 + 1e-9)
    assert set(answer.chain) <= set(downsets(graph))


def test_downsets_turned_round_are_complements() -> None:
    graph = build_blocks(forward_problem(*grid(2, 4)))
    assert sorted(255 & ~mask for mask in downsets(graph)) == downsets(turn(graph))


@pytest.mark.parametrize("border", _BORDERS)
def test_bounds_without_loose_blocks_never_exceed_the_optimum(border: Border) -> None:
    """What dropped blocks take counts for all devices together, wherever they go."""
    num_raised = 0
    for seed in range(5500, 5550):
        problem, num_devices = random_problem(seed, border, most_nodes=7)
        graph = build_blocks(problem)
        loose = loose_blocks(graph)
        best = optimum(problem, num_devices + 1)
        if not loose or len(loose) == len(graph) or math.isinf(best):
            continue
        bounds = Bounds(problem, num_devices + 1, 1e-9, time.monotonic() + 500.0)
        bounds.devices, bounds.upper = [0] * len(problem.nodes), 2.0 * best + 1.0
        smaller = drop_blocks(graph, loose, border)
        squeeze(smaller, bounds, "cheap cuts", _MANY, [graph.members[block] for block in loose])
        num_raised += bounds.lower > 0
        assert bounds.lower <= best * (1 + 1e-9) + 1e-12, seed
        if bounds.tried:
            assert greatest_load(problem, bounds.devices) <= 2.0 * best + 1.0
    assert num_raised >= 10


@pytest.mark.parametrize("seed", [0, 1])
def test_few_cuts_prove_what_all_downsets_prove(seed: int) -> None:
    problem = training_problem(*grid(4, 6), seed=seed, crossing=0.5)
    full = partition(problem, 4)
    few = partition(problem, 4, max_downsets=100)
    assert full.gap == few.gap == 0.0
    assert few.objective == pytest.approx(full.objective, rel=1e-9)
    assert "all cuts that leave room" in few.proof


@pytest.mark.parametrize("is_training", [False, True])
def test_few_cuts_come_first_only_while_blocks_are_loose(is_training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = forward_problem(*grid(4, 5), crossing=0.5)
    if is_training:
        loose = tuple(replace(node, name=node.name + "b", is_backward=True) for node in problem.nodes)
        edges = problem.edges + tuple((node.name, node.name + "b") for node in problem.nodes)
        problem = replace(problem, nodes=problem.nodes + loose, edges=edges)
    efforts: list[int] = []
    monkeypatch.setattr(solve, "squeeze", lambda graph, bounds, proof, most_states, *rest: efforts.append(most_states))
    partition(problem, 3, max_downsets=20)
    assert len(efforts) == 1 + is_training and efforts == sorted(efforts)
