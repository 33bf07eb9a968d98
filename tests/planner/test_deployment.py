"""Deployments: saved, read, edited by hand, broken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autovaruna.errors import DeploymentError
from autovaruna.planner.deployment import Deployment, Fingerprint, deployment_of, differences, load, plan_from, save
from autovaruna.planner.prediction import RankOrders
from autovaruna.planner.problem import Problem
from autovaruna.planner.search import make_plan
from tests.planner.cases import make_problem

SHAPES, SETTINGS = {"input x": "(8, 64) float32"}, {"num_stages": 0, "cuts": ("a",)}
VALID = Fingerprint("abcdef0123456789", SHAPES, 3, (2, 1), "cpu", (2e9, 2e9, 1e9), SETTINGS)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(8, 3, 12, num_stages=3, skips=2)


@pytest.fixture(scope="module")
def deployment(problem: Problem) -> Deployment:
    return deployment_of(make_plan(problem), problem.graph, VALID)


@pytest.fixture
def path(deployment: Deployment, tmp_path: Path) -> Path:
    """Returns the file of the deployment."""
    save(tmp_path / "plans" / "deployment.json", deployment)
    return tmp_path / "plans" / "deployment.json"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_comes_back_as_it_was_and_a_person_can_read_it(path: Path, deployment: Deployment, problem: Problem) -> None:
    back = load(path)
    plan = plan_from(back, problem.graph)
    assert plan == deployment.plan and differences(back.fingerprint, VALID) == []
    assert RankOrders(plan, problem.graph).planned == RankOrders(deployment.plan, problem.graph).planned
    stages = json.loads(path.read_text())["stages"]
    assert [stage["cut"] for stage in stages] == ["", *deployment.cuts]
    assert all(cut in {block.name for block in problem.graph.blocks} for cut in deployment.cuts)
    assert str(path.parent) not in path.read_text()


def test_a_file_of_a_version_with_other_schedules_is_read_unless_backwards_are_split(path: Path) -> None:
    def as_before(content: dict[str, Any]) -> None:
        for stage in content["stages"]:
            stage["deferred"] = 0
            stage["predicted"] |= {"input_seconds": 0.0, "weight_seconds": 0.0}
        content["predicted"]["block_bytes"] = {"micro_batch_size": 4, "saved_bytes": [], "work_bytes": []}
        content["predicted"]["block_bytes"]["deferred_bytes"] = []

    known = load(path)
    edit(path, as_before)
    assert load(path).plan.stages == known.plan.stages
    edit(path, lambda content: content.update(schedule="deepest_first"))
    assert load(path).plan.schedule == "interleaved"
    edit(path, lambda content: content.update(schedule="zero_bubble"))
    with pytest.raises(DeploymentError, match="'zero_bubble', is no longer there: delete the file to plan again"):
        load(path)


@pytest.mark.parametrize(
    ("stage", "change"),
    [(0, {"in_flight": 500}), (1, {"cut": "layers.0.part1"}), (1, {"ranks": [0, 1]})],
    ids=["depth", "cut", "two stages on one rank"],
)
def test_edits_that_do_not_fit_into_memory_are_refused(stage: int, change: dict[str, Any], tmp_path: Path) -> None:
    problem = make_problem(8, 3, 12, num_stages=3, skips=2, recompute="none")
    plan = make_plan(problem)
    limit = max(stage.memory_bytes for stage in plan.stages) * 1.01
    valid = replace(VALID, memory_bytes=(limit,) * 3, settings={"optimizer_bytes_factor": 2.0})
    path = tmp_path / "deployment.json"
    save(path, deployment_of(plan, problem.graph, valid))
    assert plan_from(load(path), problem.graph) == plan
    edit(path, lambda content: content["stages"][stage].update(change))
    with pytest.raises(DeploymentError, match=r"does not fit into memory: rank \d has .* need .*: move a cut"):
        plan_from(load(path), problem.graph)


@pytest.mark.parametrize("cut", ["layrs.2", "", "layers.99"])
def test_nonsense_cuts_name_the_nearest(path: Path, problem: Problem, cut: str) -> None:
    edit(path, lambda content: content["stages"][1].update(cut=cut))
    with pytest.raises(DeploymentError, match=r"names no block.*layers\."):
        plan_from(load(path), problem.graph)


def test_a_failed_save_leaves_the_old_file(path: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_text()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DeploymentError, match="No space left"):
        save(path, replace(deployment, cuts=("other", "names")))
    assert path.read_text() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (replace(VALID, graph="0123"), ["model changed", "abcdef012345 -> 0123"]),
        (replace(VALID, shapes={"input x": "(4, 64) float32"}), ["input x", "(8, 64) float32 -> (4, 64) float32"]),
        (replace(VALID, shapes={}), ["input x", "-> not set"]),
        (replace(VALID, num_ranks=4, hosts=(4,), memory_bytes=(1.0,) * 4), ["number of ranks changed (3 -> 4)"]),
        (replace(VALID, hosts=(3,)), ["2 + 1 -> 3"]),
        (replace(VALID, device="cuda"), ["cpu -> cuda"]),
        (replace(VALID, memory_bytes=(1e9,) * 3), ["memory limit", "->"]),
        (replace(VALID, settings={"num_stages": 2, "cuts": ("a",)}), ["setting num_stages changed (0 -> 2)"]),
        (replace(VALID, num_ranks=1, settings={**VALID.settings, "shard_optimizer": False}), ["(3 -> 1)"]),
    ],
)
def test_differences_say_what_changed_in_one_sentence(now: Fingerprint, words: list[str]) -> None:
    told = differences(VALID, now)
    assert len(told) == 1
    assert all(word in told[0] for word in words)


def test_a_file_of_a_version_in_which_compiled_stages_shaped_a_plan_is_no_older_for_it() -> None:
    saved = replace(VALID, settings={**VALID.settings, "compile_stages": False})
    assert differences(saved, VALID) == []
