"""Holds that what else runs on a machine for a while changes neither speeds nor costs, and that slow ranks are slow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autovaruna.profiler.bytes import Bytes
from autovaruna.profiler.measure import Key, PartCost, settle
from autovaruna.profiler.time import Pace
from autovaruna.runtime.transport.threads import run_ranks
from autovaruna.runtime.world import World
from autovaruna.session import measuring
from autovaruna.session.machine import SpeedWatch, lasting
from autovaruna.session.measuring import Turn, measure_together

PARTS = "abcde"


def cost(seconds: float) -> PartCost:
    return PartCost(seconds, 2 * seconds, Bytes(0, (), (), 0, 0))


@pytest.mark.parametrize(
    ("looks", "speeds"),
    [
        ([[1, 1 / 2], [1, 1], [1, 1]], (1, 1)),
        ([[1, 1 / 2], [1, 2], [1, 1 / 2]], (1, 1)),
        ([[1, 0.85], [1, 0.85], [1, 0.85]], (1, 1)),
        ([[1, 1 / 2, 1], [1, 1 / 3, 1], [1, 0.4, 1]], (1, 0.4, 1)),
        ([[1, 1, 2], [1, 1, 2], [1, 1, 3]], (1, 1, 2)),
        ([[0.5, 0.6, 0.55], [0.5, 0.45, 0.5], [0.5, 0.6, 0.4]], (0.5, 0.5, 0.5)),
    ],
    ids=["slow once", "slow in turn", "noise", "slow", "fast", "all slow"],
)
def test_a_rank_differs_if_it_does_at_every_look(looks: list[list[float]], speeds: tuple[float, ...]) -> None:
    assert lasting(looks) == pytest.approx(speeds)


@pytest.mark.parametrize(
    ("paces", "speeds", "of_samples"),
    [
        ([Pace(1, 1), Pace(1, 2)], (1, 0.5), (1, 1)),  # a program takes every other turn on the core of rank 1
        ([Pace(1, 1), Pace(2, 2)], (2, 1), (2, 1)),  # rank 1 is a slower machine
        ([Pace(1, 2), Pace(1, 2)], (0.5, 0.5), (1, 1)),
    ],
    ids=["shared core", "slow machine", "both shared"],
)
def test_a_step_gets_the_mean_and_samples_the_median(
    paces: list[Pace], speeds: tuple[float, ...], of_samples: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(world: World) -> tuple[tuple[float, ...], tuple[float, ...]]:
        watch = SpeedWatch(world, torch.device("cpu"))
        watch.look()
        return watch.speeds(), watch.speeds_of_samples()

    threads: Iterator[Pace] = iter(paces)
    monkeypatch.setattr("autovaruna.session.machine.measure_pace", lambda device: next(threads))
    for found in run_ranks(2, run):
        assert sorted(found[0]) == sorted(speeds) and sorted(found[1]) == sorted(of_samples)


def test_disturbed_seconds_do_not_count() -> None:
    """Each kind of seconds for itself; what lies within noise is averaged."""
    settled = settle([cost(1.0), cost(1.2), PartCost(5.0, 2.2, Bytes(0, (), (), 0, 0))])
    assert settled.seconds == pytest.approx((1.1, 2.2, 0, 0))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_every_part_is_measured_on_two_ranks(num_ranks: int, iterations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 takes three times as long, and one turn in which all take ten times as long is not seen."""
    monkeypatch.setattr(
        SpeedWatch, "speeds_of_samples", lambda watch: tuple(1 / 3 if rank == 1 else 1.0 for rank in range(num_ranks))
    )
    measured: list[tuple[str, int]] = []

    def run(world: World) -> dict[Key, PartCost]:
        def own_share(turn: Turn) -> dict[Key, PartCost]:
            first, step = turn.share
            mine = PARTS[first::step]
            measured.extend((name, world.rank) for name in mine)
            factor = (3 if world.rank == 1 else 1) * (10 if turn.place else 1)
            return {(name, 4): cost(factor * (1 + PARTS.index(name))) for name in mine}

        return measure_together(SpeedWatch(world, torch.device("cpu")), iterations, own_share)

    num_turns = min(iterations, measuring._MOST_TURNS)
    for found in run_ranks(num_ranks, run):
        assert {name: each.forward_seconds for (name, _), each in found.items()} == pytest.approx(
            {name: 1 + place for place, name in enumerate(PARTS)}
        )
    assert len(set(measured)) == len(PARTS) * min(num_turns, num_ranks) and len(measured) == len(PARTS) * num_turns


def test_what_takes_longer_than_the_budget_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget limited samples alone: the parts of a large convolutional model were all made and run again."""
    monkeypatch.setattr(measuring, "_BUDGET_SECONDS", 0.0)
    places: list[int] = []

    def run(world: World) -> dict[Key, PartCost]:
        def own_share(turn: Turn) -> dict[Key, PartCost]:
            places.append(turn.place)
            return {(PARTS[world.rank], 4): cost(1.0)}

        return measure_together(SpeedWatch(world, torch.device("cpu")), 5, own_share)

    assert all(set(found) == {("a", 4), ("b", 4)} for found in run_ranks(2, run))
    assert places == [0, 0]


def test_progress_goes_on_from_turn_to_turn() -> None:
    told: list[tuple[int, int]] = []
    for place in range(2):
        turn = Turn((0, 1), 1, 1.0, place, 2)
        for done in (1, 2):
            turn.progress(lambda done, total: told.append((done, total)))(done, 2)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
