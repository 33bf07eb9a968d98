"""Plans that are made before ranks are lost are those that would be made after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autovaruna.elastic.ahead import Request, plan_ahead
from autovaruna.elastic.job_folder import deployment_name
from autovaruna.planner.deployment import Fingerprint, differences, host_counts, load, plan_from
from autovaruna.planner.problem import Problem
from autovaruna.planner.search import make_plan
from tests.planner.cases import make_problem

LIMIT = 3e11


def on_hosts(hosts: str, limits: tuple[float, ...]) -> tuple[Problem, Fingerprint]:
    """Returns a problem on hosts with a letter each, and what its plan is valid for."""
    problem = make_problem(8, len(hosts), 12, skips=2)
    problem = replace(problem, cluster=replace(problem.cluster, hosts=tuple(hosts), memory_bytes=limits))
    return problem, Fingerprint("graph", {}, len(hosts), host_counts(tuple(hosts)), "cpu", limits)


def test_the_plans_of_one_host_and_one_rank_less_are_there(tmp_path: Path) -> None:
    problem, fingerprint = on_hosts("aabbc", (LIMIT, LIMIT, LIMIT, LIMIT, 2 * LIMIT))
    Request(problem, fingerprint, False, str(tmp_path / "plans"), True).write(tmp_path / "asked.json")
    plan_ahead(tmp_path / "asked.json")
    expected = {"bbc": (LIMIT, LIMIT, 2 * LIMIT), "aabb": (LIMIT,) * 4}
    assert sorted(each.name for each in (tmp_path / "plans").iterdir()) == [
        deployment_name(host_counts(tuple(hosts))) for hosts in ("bbc", "aabb")
    ]
    for hosts, limits in expected.items():
        smaller, valid_for = on_hosts(hosts, limits)
        saved = load(tmp_path / "plans" / deployment_name(valid_for.hosts))
        assert not differences(saved.fingerprint, valid_for)
        found, made = plan_from(saved, problem.graph), make_plan(smaller)
        assert found.predicted_seconds == pytest.approx(made.predicted_seconds)
        assert [stage.ranks for stage in found.stages] == [stage.ranks for stage in made.stages]


def test_ranks_that_share_the_memory_of_a_host_have_more_if_one_goes(tmp_path: Path) -> None:
    problem, fingerprint = on_hosts("aaa", (LIMIT,) * 3)
    for shares, times in ((True, 1.5), (False, 1.0)):
        (fewer,) = Request(problem, fingerprint, False, str(tmp_path), shares).fewer()
        assert fewer.fingerprint.hosts == (2,) and fewer.fingerprint.memory_bytes == (times * LIMIT,) * 2
    assert not list(Request(*on_hosts("ab", (LIMIT,) * 2), False, str(tmp_path), True).fewer())


def test_plans_that_are_valid_stay_and_where_there_is_none_others_are_made(tmp_path: Path) -> None:
    problem, fingerprint = on_hosts("abcc", (LIMIT,) * 4)
    Request(problem, fingerprint, False, str(tmp_path), False).write(tmp_path / "asked.json")
    plan_ahead(tmp_path / "asked.json")
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("deployment*")}
    assert sorted(times) == ["deployment-1-1-1.json", "deployment-1-1.json", "deployment-1-2.json"]
    (tmp_path / "deployment-1-1.json").write_text("{")
    plan_ahead(tmp_path / "asked.json")
    again = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("deployment*")}
    assert {name for name in times if again[name] != times[name]} == {"deployment-1-1.json"}
