"""Runs that compute weight gradients apart from backward: measured, planned, traced, with the bits of whole ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autovaruna import AutoVaruna
from autovaruna.errors import PlanError
from autovaruna.planner import search
from autovaruna.ranks.world import World
from autovaruna.stage.module import StageModule
from tests.catalogue import CASES
from tests.rank_threads import run_ranks
from tests.reference import bit_equal, sgd
from tests.session.training import QUIET, Setup, merge, pipeline, train, train_rank

SPLIT = "zero_bubble"


def measured(name: str, schedule: str, **settings: Any) -> tuple[Any, list[AutoVaruna]]:
    """Trains two stages on a plan of the planner's own; returns the record, and the models of both ranks."""
    case = CASES[name]
    given = {**QUIET, "profile_iterations": 1, "num_stages": 2, "num_micro_batches": 4, "inputs": "replicated"}

    models = [case.model() for _ in range(2)]  # before there are threads, which share torch's generator

    def be_rank(world: World) -> Any:
        model = models[world.rank]
        optimizer = sgd(model.parameters())
        wrapped = AutoVaruna(model, optimizer, **given, schedule=schedule, cuts=("body.2",), **settings)
        return train_rank(case, wrapped, optimizer, [case.batch(8, step) for step in range(2)]), wrapped

    records, wrapped_models = zip(*run_ranks(2, be_rank), strict=True)
    return merge(records), list(wrapped_models)


def test_a_measured_plan_runs_as_predicted_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage defers, every weight gradient is an instruction of the trace, and of the predicted rows beside it."""
    # The search may find that a stage had better be whole.
    monkeypatch.setattr(search, "move_choices", lambda *_: lambda *_: ())
    path = tmp_path / "events.json"
    found, (model, _) = measured("chain", SPLIT, trace_events=True, trace_events_file=str(path))
    expected, _ = measured("chain", "1f1b")
    bit_equal(found, expected)
    assert model.plan is not None
    assert all(s.deferred > 0 and s.input_seconds > 0 and s.weight_seconds > 0 for s in model.plan.stages)
    rows = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    for process in (0, 1):
        names = [row["name"] for row in rows if row["ph"] == "X" and row["pid"] == process]
        assert all(names.count(f"{stage}W{m}") == 2 for stage in (0, 1) for m in range(4))


@pytest.mark.parametrize("name", ["chain", "tied_three_ways"])
def test_replicas_and_several_stages_a_rank_sum_as_with_whole_backwards(name: str) -> None:
    for ranks in (((0, 1), (2, 3)), ((0,), (1,), (0,))):
        batches = [CASES[name].batch(7, step) for step in range(2)]
        setup = Setup(ranks, 4)
        bit_equal(train(CASES[name], replace(setup, schedule=SPLIT), batches), train(CASES[name], setup, batches))


@pytest.mark.parametrize("whole", [(), (1,), (0, 2), (0, 1, 2)])
def test_every_stage_has_something_left_for_later(whole: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, equal bits would prove nothing; a weight gradient comes only when its instruction does."""
    counts: list[int] = []
    compute = StageModule.compute_weights

    def counted(self: StageModule, deferred: Any) -> None:
        counts.append(len(deferred.gradients))
        compute(self, deferred)

    monkeypatch.setattr(StageModule, "compute_weights", counted)
    batches = [CASES["chain"].batch(7, 0)]
    found = train(CASES["chain"], pipeline(3, schedule=SPLIT, whole=whole), batches)
    assert len(counts) == 3 * (3 - len(whole)) and all(counts)
    bit_equal(found, train(CASES["chain"], pipeline(3), batches))


def test_compiled_stages_refuse_it_and_say_what_to_do() -> None:
    with pytest.raises(PlanError, match="compile_stages=False"):
        measured("chain", SPLIT, compile_stages="eager")
    setup = pipeline(2, schedule=SPLIT, settings={"compile_stages": "eager"})
    with pytest.raises(PlanError, match="compile_stages=False"):
        train(CASES["chain"], setup, [CASES["chain"].batch(7, 0)])
