"""An optimizer of a model that is split gives the weights of plain PyTorch, or says that it cannot."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import InputError
from tests.catalogue import CASES
from tests.profiler.own_optimizers import JOINT, SEPARATE, Langevin, Unknown
from tests.reference import MakeOptimizer, Record, adamw, compare
from tests.session.training import Setup, on_ranks, pipeline

CASE = CASES["conv_net_batch_norm"].without_dropout()
DECLARED = {"optimizer_bytes_factor": 4.0}
TWO = pipeline(2, num_micro_batches=1, settings=DECLARED)
REPLICAS = Setup(((0, 1),), num_micro_batches=1, settings=DECLARED)
TOKEN = (CASE.name, CASE.has_dropout)


def loss_of(model: Any, seed: int) -> Tensor:
    """Returns the loss of a batch."""
    batch = CASE.batch(7, seed)
    loss: Tensor = CASE.loss_of(model(*batch[0], **batch[1]), batch)
    return loss


def steps(model: Any, optimizer: Any, with_closure: bool = False) -> Record:
    """Makes three steps; returns the weights."""
    for seed in range(3):

        def closure(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, seed)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return Record(weights={name: each.clone() for name, each in model.state_dict().items()})


def hold(story: Callable[[Any, Any], Record], make: MakeOptimizer, setup: Setup = TWO) -> None:
    """Asserts that a story ends in the weights of plain PyTorch, on every rank."""
    plain = CASE.model()
    expected = story(plain, make(plain.parameters()))
    for found in on_ranks(setup, CASE.model(), lambda model, optimizer, _: story(model, optimizer), make, TOKEN):
        compare(found, expected, rtol=1e-4)


@pytest.mark.parametrize("name", SEPARATE)
def test_what_updates_each_parameter_by_itself_is_as_in_plain_pytorch(name: str) -> None:
    hold(steps, SEPARATE[name])


@pytest.mark.parametrize("name", JOINT)
def test_what_joins_parameters_is_refused(name: str) -> None:
    """Once, such an optimizer joined what one rank held, without a word."""

    def run(model: Any, optimizer: Any, rank: int) -> None:
        with pytest.raises(InputError, match=r"joins numbers of several parameters in its steps.*num_replicas=2"):
            loss_of(model, 0)

    on_ranks(TWO, CASE.model(), run, JOINT[name], TOKEN)


def test_noise_is_refused() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        with pytest.raises(InputError, match="Langevin draws random numbers in its steps"):
            loss_of(model, 0)

    on_ranks(TWO, CASE.model(), run, Langevin, TOKEN)


@pytest.mark.parametrize("name", ["sam", "prodigy"])
def test_every_rank_may_hold_all_parameters(name: str) -> None:
    hold(lambda model, optimizer: steps(model, optimizer, with_closure=name == "sam"), JOINT[name], REPLICAS)


def test_what_cannot_be_tried_steps_over_stand_ins(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("autovaruna").propagate = True
    hold(steps, Unknown)
    assert "cannot try out whether Unknown updates each parameter by itself" in caplog.text


def test_what_cannot_be_tried_and_joins_raises() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(InputError, match=rf"Rank {rank} does not hold"):
            optimizer.step()

    on_ranks(TWO, CASE.model(), run, lambda parameters: Unknown(parameters, does_join=True), TOKEN)


def test_the_call_that_splits_may_come_from_a_step() -> None:
    hold(lambda model, optimizer: steps(model, optimizer, with_closure=True), adamw)


def listed(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Makes an optimizer that remembers the script's own list of parameters."""
    every = list(parameters)
    optimizer = adamw(every)
    optimizer.script = every  # type: ignore[attr-defined]
    return optimizer


def both_lists(optimizer: Any) -> list[list[Any]]:
    """Returns what a script may go over: the optimizer's groups, and a list that is older than the split."""
    return [[each for group in optimizer.param_groups for each in group["params"]], optimizer.script]


def test_lists_of_parameters_show_what_is_elsewhere() -> None:
    """Once, groups and older lists held this rank's parameters, or old ones: a sum over them was that of one rank."""

    def run(model: Any, optimizer: Any, rank: int) -> int:
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
        for parameters in both_lists(optimizer):
            assert list(map(id, parameters)) == list(map(id, model.parameters()))
            for total in (lambda each: each.grad.norm() ** 2, lambda each: each.detach().square().sum()):
                with pytest.raises(InputError, match=rf"Rank {rank} does not hold"):
                    float(sum(map(total, parameters)))
        return sum(each.is_meta for each in model.parameters())

    assert all(on_ranks(TWO, CASE.model(), run, listed, TOKEN))


def edits(model: Any, optimizer: Any) -> Record:
    """Goes over the groups by hand between steps, with hooks, a schedule, a new group and a state that is loaded."""
    held_back = optimizer.param_groups[0]["params"].pop()
    seen = []
    optimizer.register_step_pre_hook(
        lambda own, *_: seen.append(sum(len(group["params"]) for group in own.param_groups))
    )
    for seed in range(4):
        loss_of(model, seed).backward()  # type: ignore[no-untyped-call]
        if seed == 1:
            optimizer.add_param_group({"params": [held_back], "lr": 0.02})
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad.mul_(1 / (1 + each.grad.norm()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=seed < 2)
        if seed:
            schedule.step()
        if seed == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen == [9, 10, 10, 10] and [group["lr"] for group in optimizer.param_groups] == [1e-3 / 8, 0.02 / 8]
    return Record(weights={name: each.clone() for name, each in model.state_dict().items()})


def test_work_on_the_groups_is_as_in_plain_pytorch() -> None:
    hold(edits, adamw)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, lambda each: torch.optim.ASGD(each, lr=0.1, foreach=True)])
def test_an_optimizer_that_is_made_after_the_split_steps(make: MakeOptimizer) -> None:
    """Once, those whose steps joined lists of tensors raised."""

    def story(model: Any, optimizer: Any) -> Record:
        steps(model, optimizer)
        return steps(model, make(model.parameters()))

    hold(story, adamw)


def test_an_optimizer_that_is_made_after_the_split_and_joins_is_refused() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(InputError, match="joins numbers of several parameters"):
            JOINT["prodigy"](model.parameters()).step()

    on_ranks(TWO, CASE.model(), run, adamw, TOKEN)


def test_the_state_of_an_optimizer_that_is_made_after_the_split_is_whole() -> None:
    def story(model: Any, optimizer: Any) -> Record:
        steps(model, optimizer)
        second = adamw(model.parameters())
        steps(model, second)
        saved = copy.deepcopy((model.state_dict(), second.state_dict()))
        assert len(pickle.loads(pickle.dumps(saved[1]))["state"]) == len(list(model.parameters()))
        steps(model, second)
        model.load_state_dict(saved[0])
        second.load_state_dict(saved[1])
        return steps(model, second)

    hold(story, adamw)


def test_a_step_that_fails_leaves_the_groups_whole() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        steps(model, optimizer)
        optimizer.param_groups[0]["betas"] = None
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        with pytest.raises(TypeError):
            optimizer.step()
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))

    on_ranks(TWO, CASE.model(), run, adamw, TOKEN)
