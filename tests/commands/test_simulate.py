"""Holds the simulate command: plans from each source, one line for each loss, and refusals that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autovaruna.__main__ import main
from autovaruna.planner.deployment import Fingerprint, deployment_of, save
from autovaruna.planner.search import make_plan
from autovaruna.varuna.profiler import Facts, ProfileFolder
from tests.planner.cases import make_cluster, make_graph, make_problem, make_profile

HERE = "tests.commands.targets"
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
    found = simulated(capsys, "--trace", trace, "--step_seconds", "1=1,2=0.5", "--loss_seconds", "9")
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


def test_a_model_is_planned_for_each_number_of_hosts(trace: str, tmp_path: Path, capsys: Any) -> None:
    """The plans are those that the plan command makes for these ranks and this many samples."""
    common = [f"{HERE}:mlp_on_meta", "--device", "h100", "--batch-size", "8", "--ranks-per-host", "2"]
    found = simulated(capsys, "--trace", trace, *common)
    for hosts in (1, 2):
        file = tmp_path / "plan.json"
        assert main(["plan", *common, "--ranks", str(2 * hosts), "-o", str(file)]) == 0
        assert json.loads(file.read_text())["predicted"]["step_seconds"] == found["step_seconds"][str(hosts)]


def test_a_profile_folder_says_what_each_number_of_hosts_can_do(trace: str, tmp_path: Path, capsys: Any) -> None:
    graph, folder = make_graph(8), ProfileFolder(tmp_path / "profile")
    folder.write(graph=graph, cluster=make_cluster(2), facts=Facts(4, 2.0))
    folder.write(profile=make_profile(graph))
    named = ["--profile-folder", str(tmp_path / "profile"), "--batch-size", "8", "--ranks-per-host", "2"]
    found = simulated(capsys, "--trace", trace, *named)
    assert set(found["step_seconds"]) == {"1", "2"}
    assert found["step_seconds"]["1"] > found["step_seconds"]["2"]
    assert main(["simulate", "--trace", trace, *named, "--memory", "1KiB"]) == 1
    assert "missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "Got no plan; expected one of MODULE:FUNCTION, --plan, --step-seconds, --profile-folder"),
        (["--step-seconds", "1=1", "--plan", "x"], "Got --plan and --step-seconds; expected one of"),
        (["--step-seconds", "1"], "--step-seconds is '1'; expected hosts=seconds, as 1=0.9,2=0.5"),
        (["--step-seconds", "0=1"], "--step-seconds is '0=1'"),
        (["--step-seconds", "1=0"], "--step-seconds is '1=0'"),
        (["--step-seconds", "1=1", "--kill-seconds", "-1"], "--kill-seconds is -1.0; expected 0 or more"),
        (["--step-seconds", "1=1", "--copy-steps", "0"], "--copy-steps is 0; expected 1 or more"),
        (["--step-seconds", "1=1", "--stop-seconds", "5"], "--stop-seconds is 5; expected a part of --change-seconds"),
        (["--plan", "nowhere.json"], "nowhere.json cannot be read"),
        (["--profile-folder", "nowhere"], "--profile-folder needs --batch-size"),
        (["--profile-folder", "nowhere", "--batch-size", "8"], "nowhere"),
        ([f"{HERE}:mlp", "--device", "h100", "--batch-size", "-1"], "--batch-size is -1"),
        ([f"{HERE}:mlp", "--ranks-per-host", "0"], "--ranks-per-host is 0"),
    ],
)
def test_what_cannot_be_simulated_says_why(trace: str, arguments: list[str], told: str, capsys: Any) -> None:
    assert main(["simulate", "--trace", trace, *arguments]) == 1
    assert told in capsys.readouterr().err
