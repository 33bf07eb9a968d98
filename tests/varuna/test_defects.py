"""What Varuna itself gets wrong: each test opens with the story. Beside them, `test_steps` and `test_profiler`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.planner.prediction import RankOrders
from autovaruna.schedule.pipeline import Kind
from autovaruna.varuna import CutPoint, Varuna
from tests.varuna.scripts import batch, close, net, on_ranks, plain_steps, steps, wrap


def test_masks_of_dropout_neither_change_in_recompute_nor_repeat() -> None:
    """The generator is not put back after a recompute, so that masks repeat."""

    def script(recompute: str) -> Any:
        def run(world: Any) -> Any:
            model = wrap("0;1", 6, 1, dropout=0.5, recompute=recompute)
            return steps(model, range(3)), {n: p.grad.clone() for n, p in model.named_parameters()}

        return on_ranks(2, run)

    recomputed, kept = script("all"), script("none")
    assert recomputed[0][0] == kept[0][0]
    found, expected = ({n: g for _, own in each for n, g in own.items()} for each in (recomputed, kept))
    assert all(torch.equal(found[name], expected[name]) for name in dict(net().named_parameters()))
    repeated = on_ranks(2, lambda world: mask_of_each_micro_batch(wrap("0;1", 6, 1, model=Dropping())))
    assert len({round(loss, 6) for loss in repeated[0]}) > 1


class Dropping(nn.Module):
    """Returns a loss that depends on which numbers were dropped alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.last = nn.Linear(5, 16), CutPoint(), nn.Linear(16, 1, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.drop(self.last(self.cut(self.drop(torch.ones_like(self.first(x * 0.0)))))).mean()


def mask_of_each_micro_batch(model: Varuna) -> list[float]:
    return [model.step(batch(6))[0] for _ in range(4)]


def test_no_shared_weights_are_no_trouble() -> None:
    """`shared_weights=None` crashes; so does a list of more than one pair."""
    for pairs in (None, [], [("embedding.weight", "head.weight"), ("layers.0.weight", "layers.1.weight")]):
        assert len(steps(wrap(None, shared_weights=pairs), range(1))) == 1


def test_a_step_of_many_micro_batches_is_not_cut_off() -> None:
    """Schedules end silently at about 5,000 micro-batches."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cut, self.last = nn.Linear(1, 1), CutPoint(), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.cut(self.first(x))).mean()

    model = wrap_tiny(Tiny())
    plan, graph = model.model.plan, model.model.preparation._traced.graph
    kinds = [(step.kind, step.micro_batch) for step in RankOrders(plan, graph).planned[0]]
    assert {m for kind, m in kinds if kind is Kind.BACKWARD} == set(range(6000))
    loss, _ = model.step({"x": torch.arange(6000.0).view(-1, 1)})
    expected = Tiny()
    expected.load_state_dict(model.state_dict())
    assert close([loss], [expected(torch.arange(6000.0).view(-1, 1)).item()])


def wrap_tiny(model: nn.Module) -> Varuna:
    """Wraps a model for one rank and 6,000 micro-batches of a sample."""
    wrapped = Varuna(
        model, None, lambda size: {"x": torch.ones(size, 1)}, 6000, 1, device="cpu", save_deployment=False,
        from_cache=False, progress=False, profile_iterations=1,
    )  # fmt: skip
    wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.0))
    return wrapped


@pytest.mark.parametrize("schedule", ["1f1b", "varuna"])
def test_no_stage_runs_ahead_of_its_memory(schedule: str) -> None:
    """A stage that waits for a gradient runs forwards without a bound."""

    def script(world: Any) -> Any:
        model = wrap("0;1;2", 12, 1, schedule=schedule)
        return model.model.plan, RankOrders(model.model.plan, model.model.preparation._traced.graph).planned

    plan, schedule_of_ranks = on_ranks(3, script)[0]
    for rank, program in enumerate(schedule_of_ranks):
        in_flight = most = 0
        for step in program:
            in_flight += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(step.kind, 0)
            most = max(most, in_flight)
        assert 1 <= most <= plan.stages[rank].in_flight


def test_what_was_saved_of_another_model_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of the dry run is keyed by nothing: another model in the same directory gets its shapes."""
    monkeypatch.chdir(tmp_path)
    cached = {"from_cache": True, "save_deployment": True}
    for case in (net(), deeper()):
        plain = deeper() if len(case.layers) > 4 else net()
        found = on_ranks(2, lambda world, case=case: steps(wrap("0;1", model=copy.deepcopy(case), **cached), range(2)))
        assert close(found[0], plain_steps(plain, 6, range(2)))
    assert (tmp_path / "deployment.json").exists()


def deeper() -> Any:
    model = net()
    model.layers.append(nn.Linear(12, 12, bias=False))
    nn.init.eye_(model.layers[-1].weight)
    model.cutpoints.append(CutPoint())
    return model


def test_a_single_rank_s_deployment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank alone has links that cost nothing, which JSON cannot say as a number."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "autovaruna")
    for _ in range(2):
        steps(wrap(None, from_cache=True, save_deployment=True, load_deployment="auto"), range(1))
    assert "using the saved deployment" in caplog.text and not list(tmp_path.glob("*.damaged"))
