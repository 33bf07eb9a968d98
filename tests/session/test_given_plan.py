"""A plan of the user's runs as plain PyTorch does, or is refused with what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autovaruna import AutoVaruna, InputError, OrderError, PlanError, RankError
from autovaruna.planner.records import Plan
from autovaruna.ranks.world import World
from autovaruna.session import measuring
from tests.catalogue import DEVICE
from tests.rank_threads import run_ranks
from tests.session.training import QUIET, Setup, descend, on_ranks, pipeline, trace_shared

SETUPS = {
    "2 stages": pipeline(2, num_micro_batches=2),
    "4 stages": pipeline(4),
    "2 replicas": Setup(((0, 1),), num_micro_batches=2),
    "2 stages of 2 replicas": Setup(((0, 2), (1, 3)), num_micro_batches=4),
    "2 stages a rank": Setup(((0,), (1,), (0,), (1,))),
    "one process": Setup(((0,), (0,))),
}
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def losses(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for _ in range(3):
        loss = model(X).square().mean()
        descend(loss, optimizer)
        found.append(loss.item())
    return found


def plain_losses() -> list[float]:
    net = make_net()
    return losses(net, torch.optim.SGD(net.parameters(), 0.1))


def run(plan: Any, num_ranks: int, **settings: Any) -> list[tuple[list[float], Plan | None]]:
    nets = [make_net() for _ in range(num_ranks)]

    def be_rank(world: World) -> tuple[list[float], Plan | None]:
        net, given = nets[world.rank], plan[world.rank] if isinstance(plan, list) else plan
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model = AutoVaruna(net, optimizer, plan=given, inputs="replicated", **QUIET, **settings)
        return losses(model, optimizer), model.plan

    with trace_shared("given plan"):
        return run_ranks(num_ranks, be_rank)


@pytest.mark.parametrize("name", SETUPS)
def test_numbers_are_those_of_plain_pytorch_and_nothing_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a function of the graph, and as the plan that this has run."""
    monkeypatch.setattr(measuring, "measured_profile", lambda *args: pytest.fail("measured"))
    setup, expected = SETUPS[name], pytest.approx(plain_losses(), rel=1e-5)
    first = run(setup.plan, setup.world_size)
    plan = first[0][1]
    assert plan is not None and [stage.ranks for stage in plan.stages] == list(setup.stage_ranks)
    assert all(found == (expected, plan) for found in (*first, *run(plan, setup.world_size)))


def test_one_process_that_needs_no_plan_is_prepared_by_doing_nothing() -> None:
    model = AutoVaruna(make_net(), **QUIET)
    model.prepare(X)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.adopt(optimizer)
    assert model.plan is None and model.num_traces == 0
    assert losses(model, optimizer) == plain_losses()


def with_stage(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, stages=(replace(plan.stages[0], **changes), *plan.stages[1:]))


WRONG: dict[str, tuple[Any, str]] = {
    "ranks": (lambda plan: replace(plan, num_ranks=4), "for 4 ranks: got 2"),
    "blocks": (lambda plan: with_stage(plan, blocks=(0,)), r"blocks 0 to \d+ of the model"),
    "replicas": (lambda plan: with_stage(plan, ranks=(0, 5)), r"different ranks from 0 to 1: got \[\(0, 5\)\]"),
    "schedule": (lambda plan: replace(plan, schedule="none"), "schedule is none, expected one of 1f1b"),
    "evaluation": (lambda plan: replace(plan, needs_gradient=False), "for evaluation"),
    "state": (lambda plan: replace(plan, shares_state=True), "shares out the optimizer's state"),
}


@pytest.fixture(scope="module")
def two_stages() -> Plan:
    (_, plan), _ = run(pipeline(2, num_micro_batches=2).plan, 2)
    assert plan is not None
    return plan


@pytest.mark.parametrize("what", WRONG)
def test_one_that_does_not_fit_is_refused(what: str, two_stages: Plan) -> None:
    change, words = WRONG[what]
    with pytest.raises(PlanError, match=f"The given plan cannot run: .*{words}"):
        run(change(two_stages), 2, shard_optimizer=False)


def test_what_is_no_plan_another_one_on_each_rank_or_contradicts_a_setting_is_refused(two_stages: Plan) -> None:
    with pytest.raises(PlanError, match="has 2 micro-batches, but num_micro_batches=4"):
        run(two_stages, 2, num_micro_batches=4)
    with pytest.raises(RankError, match=r"Ranks \[1\] were given another plan than rank 0"):
        run([two_stages, replace(two_stages, given_up="other")], 2)
    with pytest.raises(RankError, match="plan is given on rank 0, None on rank 1"):
        run([two_stages, None], 2)
    with pytest.raises(InputError, match=r"expected a Plan, or a function .* pass deployment_file"):
        AutoVaruna(make_net(), plan="deployment.json")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="given as plan returned 3; expected a Plan"):
        run(lambda graph: 3, 1)


def after_the_split(setup: Setup, act: Callable[[AutoVaruna, torch.optim.Optimizer], Any]) -> list[Any]:
    """Returns what ranks make of a model that is split, with an optimizer of their own parameters made after that."""

    def run(model: AutoVaruna, _: Any, rank: int) -> Any:
        model.prepare(X)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.adopt(optimizer)
        return act(model, optimizer)

    without = lambda model, _, **settings: AutoVaruna(model, optimizer_bytes_factor=0, **settings)  # noqa: E731
    return on_ranks(setup, make_net(), run, wrap=without)


@pytest.mark.parametrize("name", ["2 stages", "2 stages of 2 replicas"])
def test_an_optimizer_may_be_made_after_the_split(name: str) -> None:
    """It lists the parameters of this rank alone."""
    setup, net = SETUPS[name], make_net()
    with pytest.raises(OrderError, match="got no prepare"):
        AutoVaruna(net, plan=setup.plan).adopt(torch.optim.SGD(net.parameters(), 0.1))
    expected = pytest.approx(plain_losses(), rel=1e-5)
    assert after_the_split(setup, losses) == [expected] * setup.world_size


def test_an_overflow_on_one_rank_skips_the_step_of_an_optimizer_that_was_made_after_the_split() -> None:
    """Once, the other rank stepped: only an optimizer of the start had its gradients unscaled on all ranks at once."""

    def overflow(model: AutoVaruna, optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
        own, scaler = optimizer.param_groups[0]["params"], torch.amp.GradScaler(DEVICE.type, init_scale=4.0)
        scaler.scale(model(X).square().mean()).backward()
        if model.world.rank == 1:
            own[0].grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        before = [each.detach().clone() for each in own]
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), all(map(torch.equal, before, own))

    assert after_the_split(SETUPS["2 stages"], overflow) == [(2.0, True)] * 2
