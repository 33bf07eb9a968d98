"""Ranks that hang are found and named without a time-out of the user's, and a false alarm makes the next one rarer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autovaruna.elastic import watch as module
from autovaruna.elastic.watch import JobWatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Returns the clock that watches look at, at 1000 s."""
    found = SimpleNamespace(now=1000.0)
    found.monotonic = lambda: found.now
    monkeypatch.setattr(module, "time", found)
    return found


def rank(calls: int, is_inside: bool = True, state: str = "S", gone: float = 0.0, **more: Any) -> dict[str, Any]:
    """Returns what a keeper says of a rank."""
    said = {"calls": calls, "steps": calls, "is_inside": is_inside, "state": state, "gone_seconds": gone}
    return {**said, "is_signalled": False, "is_kept": True, "work_seconds": 0.0, "work": [], **more}


def report(newest: int | None = None, copied: object = None, **ranks: dict[str, Any]) -> dict[str, Any]:
    """Returns what a keeper says of its ranks, ``r0`` and so on."""
    found = {name[1:]: its for name, its in ranks.items()}
    held = {"newest": newest, "copied": copied, "is_alone": False}
    return {"attempt": 1, **held, "ranks": found, "predicted": {}, "is_full": False}


def trained(clock: SimpleNamespace, seconds: float = 0.5, num_calls: int = 5) -> JobWatch:
    """Returns a watch over ranks 0 and 1 on hosts a and b that have trained for some calls of so many seconds."""
    watch = JobWatch(1)
    for calls in range(1, num_calls + 1):
        clock.now += seconds
        watch.record("a", report(r0=rank(calls)))
        watch.record("b", report(r1=rank(calls)))
    return watch


def test_a_rank_that_is_stopped_is_named_within_seconds(clock: SimpleNamespace) -> None:
    watch = trained(clock)
    for _ in range(5):
        assert watch.hang() is None
        watch.record("a", report(r0=rank(6)))
        watch.record("b", report(r1=rank(5, state="T")))
        clock.now += 1.0
    found = watch.hang()
    assert found is not None and found.words == "rank 1 on b is stopped by a signal" and 4 < found.seconds < 6
    assert found.is_from_outside


def test_a_rank_that_is_stopped_for_a_moment_is_not(clock: SimpleNamespace) -> None:
    watch = trained(clock)
    for state in ("T", "T", "S", "T", "T", "T"):
        watch.record("b", report(r1=rank(5, state=state)))
        clock.now += 1.2
    assert watch.hang() is None


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (rank(6), rank(5, False), "rank 1 on b is in the script, outside of the model; the others wait in it"),
        (rank(6), rank(5), "rank 1 on b is inside of the model, in call 5"),
        (rank(5, False), rank(5, False), "all ranks are in the script, outside of the model"),
        (rank(6), rank(6), "rank 0 on a, rank 1 on b are inside of the model, in call 6"),
    ],
)
def test_words_say_which_rank_hangs_and_where(
    clock: SimpleNamespace, first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    watch = trained(clock)
    watch.record("a", report(r0=first))
    watch.record("b", report(r1=second))
    clock.now += 19.0
    assert watch.hang() is None
    clock.now += 2.0
    found = watch.hang()
    assert found is not None and found.words == words and not found.is_from_outside


def test_after_an_alarm_the_next_one_waits_longer_until_the_job_has_come_further(clock: SimpleNamespace) -> None:
    """Once, it waited 20 times as long for the rest of the job."""
    watch = trained(clock)
    clock.now += 21.0
    assert watch.hang() is not None
    for num_calls, seconds, is_found in ((4, 200.0, False), (5, 200.0, False), (5, 430.0, True), (6, 21.0, True)):
        again = JobWatch(1, watch)
        for calls in range(1, num_calls + 1):
            again.record("a", report(r0=rank(calls)))
            clock.now += 0.5
        clock.now += seconds
        assert (again.hang() is not None) is is_found, num_calls


def test_a_manager_that_stood_still_takes_no_rank_for_one_that_hangs(clock: SimpleNamespace) -> None:
    watch = trained(clock)
    watch.record("b", report(r1=rank(5, state="T")))
    clock.now += 25.0
    watch.skip(25.0)
    assert watch.hang() is None
    watch.record("b", report(r1=rank(6)))
    clock.now += 21.0
    assert watch.hang() is not None, "the pause was none of the ranks'"


def test_nobody_hangs_who_has_not_trained_yet(clock: SimpleNamespace) -> None:
    watch = trained(clock, num_calls=1)
    clock.now += 3600.0
    assert watch.hang() is None


def test_a_state_is_held_once_each_host_has_it_and_a_copy(clock: SimpleNamespace) -> None:
    watch = trained(clock)
    assert not watch.holds_any
    watch.record("a", report(newest=3, r0=rank(5)))
    watch.record("b", report(newest=3, copied=[1, 3], r1=rank(5)))
    assert watch.holds_any and watch.held_step(["a", "b"]) == -1 and watch.held_step(["a"]) == 3
    watch.record("a", report(newest=4, copied=[1, 2], r0=rank(5)))
    assert watch.held_step(["a", "b"]) == 2


def test_ranks_can_leave_at_a_border_once_they_have_trained_and_take_snapshots(clock: SimpleNamespace) -> None:
    watch = JobWatch(1)
    assert not watch.can_leave
    for its, expected in ((rank(1), False), (rank(1, is_inside=False), True), (rank(2), True)):
        watch.record("a", report(r0=its))
        assert watch.can_leave is expected
    watch.record("a", report(r0=rank(2, is_kept=False)))
    assert not watch.can_leave
    watch.record("a", {**report(r0=rank(2)), "is_full": True})
    assert not watch.can_leave and watch.full_hosts == ["a"], "the step at the border would not be whole"


def test_the_first_that_went_is_named(clock: SimpleNamespace) -> None:
    watch = trained(clock)
    watch.record("a", report(r0=rank(5, gone=0.3)))
    watch.record("b", report(r1=rank(5, gone=0.9)))
    assert watch.first_gone([]) == "rank 1 on b is gone"
    assert watch.first_gone([1]) == "rank 0 on a is gone"
    assert watch.first_gone([0, 1]) == ""
