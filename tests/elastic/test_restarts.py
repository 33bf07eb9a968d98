"""When a job is started again, and when it is given up."""

from __future__ import annotations

from autovaruna.elastic.manager import Restarts
from autovaruna.elastic.run import Outcome

KILLED, FAILED = Outcome("rank 1 was ended by SIGKILL"), Outcome("rank 1 ended with status 3", error=3)


def test_a_job_whose_script_fails_at_one_step_again_and_again_is_given_up() -> None:
    restarts = Restarts(100)
    assert [restarts.note(FAILED, 7) for _ in range(3)] == [""] * 3
    assert "3 runs failed and came no further" in restarts.note(FAILED, 7)


def test_one_that_comes_further_each_time_goes_on() -> None:
    restarts = Restarts(100)
    assert not any(restarts.note(FAILED, step) for step in range(50))


def test_faults_during_recoveries_do_not_end_a_job() -> None:
    restarts = Restarts(100)
    assert not any(restarts.note(KILLED, 7) for _ in range(20))
    assert not any(restarts.note(each, 7) for each in (FAILED, KILLED, FAILED, KILLED))
    assert restarts.note(FAILED, 7)


def test_whatever_ends_a_job_too_often_within_an_hour_ends_it_for_good() -> None:
    restarts = Restarts(4)
    assert [bool(restarts.note(KILLED, step)) for step in range(5)] == [False] * 4 + [True]
