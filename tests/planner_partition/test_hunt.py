"""Lets the hunt for the optimum choose limits, and answers them from rules that are easy to see through."""

from __future__ import annotations

import pytest

from autovaruna.planner.partition import PartitionNode, PartitionProblem
from autovaruna.planner.partition.bounds import Bounds
from autovaruna.planner.partition.hunt import Hunt


def _hunt(low: float, high: float) -> Hunt:
    bounds = Bounds(PartitionProblem((PartitionNode("a", 1.0),), ()), 2, 1e-9, 0.0)
    bounds.lower, bounds.upper = low, high
    return Hunt(bounds)


def _follow(hunt: Hunt, optimum: float, most_proven: float, least_found: float) -> list[tuple[float, bool]]:
    """Answers as if proofs took too long above one limit, and chains were not found below another one."""
    steps = []
    while (step := hunt.next_step()) is not None:
        load, is_for_proof = step
        steps.append(step)
        if not is_for_proof and load >= least_found:
            hunt.found(load)
        elif is_for_proof and load <= most_proven:
            hunt.found(max(optimum, 0.99 * load)) if load >= optimum else hunt.refuted(load)
        else:
            hunt.gave_up(load)
    return steps


def test_both_ends_meet_where_every_limit_is_decided() -> None:
    hunt = _hunt(10.0, 20.0)
    steps = _follow(hunt, optimum=17.3, most_proven=100.0, least_found=0.0)
    assert hunt.low == pytest.approx(17.3) and hunt.high == pytest.approx(17.3)
    assert all(is_for_proof for _, is_for_proof in steps)


def test_proofs_begin_where_they_are_cheap_and_take_longer_steps() -> None:
    loads = [load for load, _ in _follow(_hunt(10.0, 20.0), optimum=20.0, most_proven=100.0, least_found=0.0)]
    assert loads[:3] == pytest.approx([11.0, 13.0, 16.5])


def test_giving_up_a_proof_does_not_end_the_search_for_plans() -> None:
    hunt = _hunt(10.0, 20.0)
    _follow(hunt, optimum=14.0, most_proven=12.0, least_found=15.0)
    assert hunt.low == pytest.approx(12.0, abs=0.03)
    assert hunt.high == pytest.approx(15.0, abs=0.03)
