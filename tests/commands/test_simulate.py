"""The simulate command: what each fault of a trace costs, refusals that say what to do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from autovaruna.__main__ import main
from autovaruna.commands.simulate import Change, FaultCosts, read_trace, replay
from autovaruna.errors import InputError
from autovaruna.planner.deployment import Fingerprint, deployment_of, save
from autovaruna.planner.search import make_plan
from tests.planner.cases import make_problem

ROWS = "seconds,hosts\n0,2\n600,1\n660,2\n1200,2\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.csv"
    file.write_text(ROWS)
    return str(file)


def simulated(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main(["simulate", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def deployment(folder: Path, hosts: int) -> str:
    """Returns the file of a deployment for so many hosts of two ranks."""
    problem = make_problem(8, 2 * hosts, 12)
    fingerprint = Fingerprint("abc", num_ranks=2 * hosts, hosts=(2,) * hosts, device="cpu")
    file = folder / f"{hosts}.json"
    save(file, deployment_of(make_plan(problem), problem.graph, fingerprint))
    return str(file)


def test_the_losses_are_shown_and_add_up(trace: str, capsys: Any) -> None:
    assert main(["simulate", "--trace", trace, "--step-seconds", "1=1,2=0.5"]) == 0
    printed = capsys.readouterr().out
    assert "0.3333 h, 1 to 2 hosts, 1 host losses, 1 additions" in printed
    assert all(f"lost to {what}" in printed for what in ("restarts", "lost steps", "smaller plans"))
    assert "1: 1 s, 2: 500 ms" in printed and "no plan" not in printed
    found = simulated(capsys, "--trace", trace, "--step-seconds", "1=1,2=0.5", "--loss-seconds", "9")
    shares = [found[f"lost_to_{what}"] for what in ("restarts", "lost_steps", "smaller_plans")]
    assert found["share_of_ideal"] + sum(shares) == pytest.approx(1.0)
    assert found["costs"]["loss_seconds"] == 9 and found["restart_steps"] == pytest.approx(9 + 2)


def test_deployments_say_the_seconds_of_a_step(trace: str, tmp_path: Path, capsys: Any) -> None:
    files = [deployment(tmp_path, hosts) for hosts in (1, 2)]
    found = simulated(capsys, "--trace", trace, "--plan", *files)
    assert found["step_seconds"]["1"] > found["step_seconds"]["2"] > 0
    assert main(["simulate", "--trace", trace, "--plan", files[1]]) == 0
    assert "no plan for 1" in capsys.readouterr().out
    assert main(["simulate", "--trace", trace, "--plan", files[0], files[0]]) == 1
    assert "another one is for 1 hosts, too; expected one deployment for each" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--step-seconds", "1"], "--step-seconds is '1'; expected hosts=seconds, as 1=0.9,2=0.5"),
        (["--step-seconds", "0=1"], "--step-seconds is '0=1'"),
        (["--step-seconds", "1=0"], "--step-seconds is '1=0'"),
        (["--step-seconds", "1=1", "--kill-seconds", "-1"], "--kill-seconds is -1.0; expected 0 or more"),
        (["--step-seconds", "1=1", "--copy-steps", "0"], "--copy-steps is 0; expected 1 or more"),
        (["--step-seconds", "1=1", "--stop-seconds", "5"], "--stop-seconds is 5; expected a part of --change-seconds"),
        (["--plan", "nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_what_cannot_be_simulated_says_why(trace: str, arguments: list[str], told: str, capsys: Any) -> None:
    assert main(["simulate", "--trace", trace, *arguments]) == 1
    assert told in capsys.readouterr().err


STEPS = {1: 1.0, 2: 0.5, 3: 0.4}


def result_of(*rows: tuple[float, int] | tuple[float, int, str], **costs: float):
    return replay([Change(*row) for row in rows], STEPS, FaultCosts(**costs))


@pytest.mark.parametrize(
    ("rows", "copy_steps", "lost", "restart", "done"),
    [
        ([(0, 2), (100, 2), (200, 0)], 10, 0.0, 0.0, 400),
        ([(0, 1), (50.4, 1, "kill"), (100, 0)], 10, 0.4, 3.0, 96.6),
        ([(0, 2), (8.75, 1), (108.75, 0)], 4, 1.5, 6.0, 16 + 94),
        ([(0, 2), (10.25, 1, "notice"), (110, 0)], 10, 0.0, 0.5 + 1.0, 20 + 98.75),
    ],
    ids=["no fault", "a killed rank: the step under way", "a lost host: steps since the last copy", "a notice: none"],
)
def test_what_a_fault_costs_beside_the_restart(rows, copy_steps: int, lost: float, restart: float, done: float):
    result = result_of(*rows, copy_steps=copy_steps)
    found = (result.lost_steps, result.restart_steps, result.done_steps)
    assert (result.ideal_steps == result.done_steps) == (restart == 0) == (result.num_restarts == 0)
    assert found == (pytest.approx(lost), pytest.approx(restart), pytest.approx(done))


@pytest.mark.parametrize("rows", [[(0, 3), (78, 1)], [(0, 3), (78, 2), (80, 1)], [(0, 1), (195, 0), (200, 1)]])
def test_what_no_copy_makes_good_goes_on_from_disk(rows: list[tuple[float, int]]):
    result = result_of(*rows, (300, 0), copy_steps=1, checkpoint_steps=100)
    assert result.lost_steps == pytest.approx(95)


def test_a_host_that_comes_stops_the_job_for_a_moment_at_the_end_of_a_step():
    """Without the host a step takes 1 s: it is ready at 13.5 s, the step ends at 14 s, the job goes on at 15 s."""
    result = result_of((0, 1), (10.5, 2), (115, 0))
    assert result.lost_steps == 0 and result.num_restarts == 1
    assert result.done_steps == pytest.approx(14 + 200)
    assert result.restart_steps == pytest.approx(2.0) and result.smaller_steps == pytest.approx(3.5)


def test_hosts_that_no_plan_uses_are_lost_to_smaller_plans():
    rows, costs = [Change(0, 3), Change(10, 1), Change(20, 0)], FaultCosts(copy_steps=1, checkpoint_steps=1)
    result = replay(rows, {2: 0.5}, costs)
    assert result.done_steps == pytest.approx(20) and result.ideal_steps == pytest.approx(30 + 10)
    assert result.smaller_steps == pytest.approx(20) and result.restart_steps == 0


@pytest.mark.parametrize("seed", range(50))
def test_every_step_of_the_ideal_is_counted_once(seed: int):
    rng = random.Random(seed)
    seconds, trace = 0.0, [Change(0.0, rng.randint(0, 4))]
    for _ in range(200):
        seconds += rng.choice([0.1, 3.0, 20.0, 600.0]) * rng.random() + 1e-3
        hosts = rng.randint(0, 4)
        event = "kill" if hosts == trace[-1].hosts else rng.choice(["", "notice"]) if hosts < trace[-1].hosts else ""
        trace.append(Change(seconds, hosts, event))
    step_seconds = {hosts: rng.uniform(0.05, 30.0) for hosts in rng.sample(range(1, 5), rng.randint(1, 4))}
    result = replay(trace, step_seconds, FaultCosts(copy_steps=rng.randint(1, 20)))
    parts = (result.done_steps, result.restart_steps, result.lost_steps, result.smaller_steps)
    assert all(part >= -1e-9 for part in parts)
    assert sum(parts) == pytest.approx(result.ideal_steps, rel=1e-9)


def test_a_trace_is_read_with_or_without_names_and_comments(tmp_path: Path):
    file = tmp_path / "trace.csv"
    file.write_text("# of a week in May\nseconds, hosts, event\n0, 3,\n\n60.5,3,kill\n# two leave\n90,1,notice\n")
    assert read_trace(file) == [Change(0.0, 3), Change(60.5, 3, "kill"), Change(90.0, 1, "notice")]
    file.write_text("0,3\n10,2\n")
    assert read_trace(file) == [Change(0.0, 3), Change(10.0, 2)]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("20", r"got 1 columns \(20\), expected seconds,hosts or seconds,hosts,event"),
        ("20,2,kill,now", "got 4 columns"),
        ("soon,2", "seconds are 'soon', expected a number of 0 or more"),
        ("nan,2", "seconds are 'nan'"),
        ("-1,2", "seconds are '-1'"),
        ("inf,2", "seconds are 'inf'"),
        ("10,2", "seconds are 10, expected more than 10"),
        ("20,two", "hosts are 'two', expected a whole number of 0 or more"),
        ("20,-1", "hosts are '-1'"),
        ("20,1.5", "hosts are '1.5'"),
        ("20,2,fire", "event is 'fire', expected kill, notice or nothing"),
        ("20,2,kill", "hosts are 2 at a kill, expected as many as in the row before"),
        ("20,4,notice", "hosts are 4 at a notice, expected fewer"),
        ("seconds,hosts", "seconds are 'seconds'"),
    ],
)
def test_a_bad_row_is_refused_with_its_place(tmp_path: Path, row: str, told: str):
    file = tmp_path / "trace.csv"
    file.write_text(f"seconds,hosts\n0,3\n10,3\n{row}\n30,3\n")
    with pytest.raises(InputError, match=rf"trace\.csv, line 4: {told}"):
        read_trace(file)
