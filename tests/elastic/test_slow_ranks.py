"""Holds who is called slow: the one that is, soon, and nobody else, ever."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from autovaruna.elastic import slow_ranks as module
from autovaruna.elastic.notices import EventLog
from autovaruna.elastic.slow_ranks import Place, Recovered, Slow, SlowRanks, Speeds
from autovaruna.planner.prediction import pipeline_of, policy_of
from autovaruna.planner.search import make_plan
from autovaruna.schedule.simulator import simulate
from tests.planner.cases import make_problem

NOISE = 0.03
Factor = Callable[[int, int], float]
"""How many times as long as its share a rank takes in a step."""
RANKS = {"h0": 2, "h1": 2}
SLOW, WELL = Slow(1, 30, 1.2, "its own past"), Recovered(1, 40)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gets the file of the hosts that are left out."""
    monkeypatch.chdir(tmp_path)


class Job:
    """A job of ranks whose stages take 1, 1.5, 2, ... seconds, and whose plan predicts twice as much."""

    def __init__(self, num_ranks: int, seed: int = 0, predicted: Mapping[int, float] | None = None):
        self.seconds = {rank: 1.0 + 0.5 * rank for rank in range(num_ranks)}
        self.rng = random.Random(seed)
        self.speeds = Speeds(predicted or {rank: 2 * each for rank, each in self.seconds.items()})

    def run(self, steps: range, factor: Factor = lambda rank, step: 1.0) -> list[Slow | Recovered]:
        """Runs some steps; the ranks report in another order each time. Returns all that was said."""
        said: list[Slow | Recovered] = []
        for step in steps:
            for rank in self.rng.sample(sorted(self.seconds), len(self.seconds)):
                seconds = self.seconds[rank] * factor(rank, step) * (1 + NOISE * self.rng.gauss(0, 1))
                said += self.speeds.report(rank, step, seconds)
        return said


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(30))
def test_a_rank_slowed_by_15_percent_is_named_within_ten_steps(num_ranks: int, seed: int):
    job = Job(num_ranks, seed, predicted=dict.fromkeys(range(num_ranks), 0.0))
    victim, start = job.rng.randrange(num_ranks), job.rng.randrange(20, 200)
    assert not job.run(range(start))
    (said,) = job.run(range(start, start + 10), lambda rank, step: 1.15 if rank == victim else 1.0)
    assert isinstance(said, Slow) and said.rank == victim and said.step < start + 10
    assert 1.05 < said.factor < 1.25 and said.compared_with == "its own past"
    assert job.speeds.slow == {victim: said}


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_is_slow_from_the_start_is_named_by_the_prediction(num_ranks: int, seed: int):
    job = Job(num_ranks, seed)
    victim = job.rng.randrange(num_ranks)
    (said,) = job.run(range(12), lambda rank, step: 1.2 if rank == victim else 1.0)
    assert isinstance(said, Slow) and said.rank == victim and said.compared_with == "the prediction"


def whole_machine(factor: float) -> Factor:
    """Some ranks feel its change a step later than others."""
    return lambda rank, step: factor if step >= 100 + rank % 2 else 1.0


NOBODY_IS_SLOW: dict[str, tuple[int, Factor]] = {
    "noise alone": (10_000, lambda rank, step: 1.0),
    "a machine that is a little slower": (300, whole_machine(1.15)),
    "a machine that is slower": (300, whole_machine(3.0)),
    "a machine that is faster": (300, whole_machine(0.5)),
    "batches of other sizes": (2000, lambda rank, step: random.Random(step).uniform(0.5, 2.0)),
    "hiccups": (3000, lambda rank, step: 5.0 if random.Random(8 * step + rank).random() < 0.03 else 1.0),
    "slow first steps": (500, lambda rank, step: 3.0 if step < 2 and rank == 0 else 1.0),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("case", NOBODY_IS_SLOW)
def test_what_concerns_all_ranks_or_single_steps_names_nobody(case: str, num_ranks: int):
    num_steps, factor = NOBODY_IS_SLOW[case]
    assert not Job(num_ranks, seed=num_ranks).run(range(num_steps), factor)


def test_two_slow_ranks_of_three_are_named():
    said = Job(3).run(range(110), lambda rank, step: 1.2 if rank and step >= 100 else 1.0)
    assert sorted(each.rank for each in said if isinstance(each, Slow)) == [1, 2] and len(said) == 2


def test_a_rank_that_recovers_is_forgiven():
    job = Job(4)
    job.run(range(100))
    job.run(range(100, 120), lambda rank, step: 1.3 if rank == 2 else 1.0)
    assert set(job.speeds.slow) == {2}
    (said,) = job.run(range(120, 150))
    assert isinstance(said, Recovered) and said.rank == 2 and said.step < 142 and not job.speeds.slow


@pytest.mark.parametrize("num_ranks", [1, 3, 6])
def test_the_predicted_seconds_are_those_of_the_simulated_step(num_ranks: int):
    problem = make_problem(8, num_ranks, 12)
    plan = make_plan(problem)
    busy = [
        sum(act[1] - act[0] for act in acts)
        for acts in simulate(pipeline_of(plan, problem.graph), policy_of(plan.schedule)).acts
    ]
    assert plan.work_seconds() == pytest.approx(dict(enumerate(busy)))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_a_rank_that_the_plan_gives_less_may_recover_or_get_slower_still(factor: float, num_ranks: int):
    job = Job(num_ranks, seed=num_ranks)
    job.speeds = Speeds({rank: each * (1.2 if rank == 1 else 1.0) for rank, each in job.seconds.items()}, {1: 1.2})
    assert set(job.speeds.slow) == {1}
    assert not job.run(range(100), lambda rank, step: 1.2 if rank == 1 else 1.0)
    first, *more = job.run(range(100, 110), lambda rank, step: factor if rank == 1 else 1.0)
    assert first.rank == 1
    if factor == 1.0:
        assert isinstance(first, Recovered) and 1 not in job.speeds.slow
    else:
        assert isinstance(first, Slow) and not more and 1.1 < first.factor < 1.25


@pytest.fixture
def slow_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowRanks]:
    """Plans may follow each other at once, and what has just become slow."""
    monkeypatch.setattr(module, "_BETWEEN_SECONDS", -1.0)
    monkeypatch.setattr(module, "_LASTING_SECONDS", -1.0)
    slow_ranks = SlowRanks(EventLog(None), 1.5)
    slow_ranks.begin(RANKS)
    yield slow_ranks


def changes(*changes: Slow | Recovered) -> list[tuple[Place, Slow | Recovered]]:
    """Returns changes of ranks, each on a host of its name."""
    return [((f"h{each.rank}", 0), each) for each in changes]


def test_a_plan_is_made_anew_where_other_hosts_are_slow_than_it_knows(slow_ranks: SlowRanks):
    slow_ranks.record(changes(SLOW))
    assert slow_ranks.wants_plan and slow_ranks.begin(RANKS) and not slow_ranks.wants_plan
    assert slow_ranks.factors() == (1.0, 1.0, 1.2, 1.0)
    slow_ranks.record(changes(WELL))
    assert slow_ranks.wants_plan and slow_ranks.begin(RANKS) and not slow_ranks.wants_plan
    assert slow_ranks.factors() == (1.0,) * 4
    slow_ranks.record(changes(SLOW))
    slow_ranks.begin(RANKS)
    slow_ranks.record(changes(SLOW))  # slower still than in the run of that plan
    assert slow_ranks.wants_plan and slow_ranks.factors() == (1.0, 1.0, pytest.approx(1.44), 1.0)


def test_a_host_is_left_out_that_is_slow_for_longer_than_a_start_takes_and_no_other_beside_it(
    slow_ranks: SlowRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, ten slow steps of 50 ms put a host out for ten minutes, and on a busy machine two of three."""
    slow_ranks.record_start(0.3)
    slow_ranks.record(changes(replace(SLOW, factor=2.0), replace(SLOW, rank=0, factor=2.5)))
    time.sleep(0.4)
    assert not slow_ranks.leaves_out("h0") and not slow_ranks.wants_plan, "a run has just begun"
    monkeypatch.setattr(module, "_SETTLING_SECONDS", -1.0)
    assert slow_ranks.leaves_out("h0") and not slow_ranks.leaves_out("h1")
    slow_ranks.forgive("h0")
    slow_ranks.record(changes(replace(SLOW, rank=0, factor=2.5)))
    assert not slow_ranks.leaves_out("h0") and slow_ranks.leaves_out("h1"), "as long as it is slow for a moment"


@pytest.mark.parametrize(("seconds", "is_wanted"), [(60.0, True), (100.0, False)])
def test_a_plan_is_made_anew_only_if_it_wins_its_cost_back_in_ten_minutes(
    slow_ranks: SlowRanks, seconds: float, is_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four ranks one takes 1.2 times as long: 13 % of a step."""
    monkeypatch.setattr(module, "_SETTLING_SECONDS", -1.0)
    slow_ranks.record(changes(SLOW))
    assert slow_ranks.wants_plan
    slow_ranks.record_start(seconds)
    monkeypatch.setattr(module.time, "monotonic", partial(lambda begin: begin + 200.0, time.monotonic()))
    assert slow_ranks.wants_plan == is_wanted


def test_each_set_of_hosts_has_its_own_plan(slow_ranks: SlowRanks):
    slow_ranks.record(changes(SLOW))
    assert not slow_ranks.begin({"h0": 2}) and not slow_ranks.wants_plan and slow_ranks.factors() == (1.0, 1.0)
    others = {"h1": 2, "h2": 2}
    assert slow_ranks.begin(others) and slow_ranks.factors() == (1.2, 1.0, 1.0, 1.0)
    assert slow_ranks.begin(RANKS) and not slow_ranks.begin(others)  # each of the plans has been made once
    assert not slow_ranks.begin({"h1": 1}), "one rank alone has all to do"


def test_a_rank_that_is_slow_now_and_then_hides_no_other_and_fills_no_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_LASTING_SECONDS", 0.2)
    slow_ranks = SlowRanks(EventLog(str(tmp_path / "events")), 1.5)
    slow_ranks.begin(RANKS)
    slow_ranks.record(changes(SLOW))
    for _ in range(6):
        slow_ranks.record(changes(Slow(0, 30, 1.2, "its own past"), Recovered(0, 31)))
        time.sleep(0.05)
    assert slow_ranks.begin(RANKS) and slow_ranks.factors() == (1.0, 1.0, 1.2, 1.0)
    assert capsys.readouterr().err.count("rank 0") == 2
    assert (tmp_path / "events").read_text().count('"rank": 0') == 6
