"""Optimizers and clipping of a model that is split give plain PyTorch's weights, or say that they cannot."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import InputError, RankError
from tests.catalogue import CASES
from tests.profiler.own_optimizers import JOINT, SEPARATE, Langevin, Unknown
from tests.reference import MakeOptimizer, Record, adamw, compare, gradients_of
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


CHAIN = CASES["chain"].without_dropout()
SETUPS = {
    "two": pipeline(2, num_micro_batches=1),
    "idle_rank": Setup(((0,), (1,)), num_ranks=3, num_micro_batches=1),
    "shared_state": Setup(((0, 1), (1, 2)), num_micro_batches=1, settings={"shard_optimizer": True}),
}
LISTS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "parameters": lambda model, optimizer: model.parameters(),
    "groups": lambda model, optimizer: [each for group in optimizer.param_groups for each in group["params"]],
    "some": lambda model, optimizer: list(model.parameters())[1:-1],
}


def clip_by_norm(parameters: list[Any]) -> Any:
    """Clips once by the second norm and once by the largest number, in the two ways that torch has."""
    return [nn.utils.clip_grad_norm_(parameters, *way) for way in ((0.1, 2.0, False, True), (0.01, torch.inf))]


def clip_by_value(parameters: list[Any]) -> Any:
    """Clips each number, as parameters are on any device: torch chooses the way."""
    nn.utils.clip_grad_value_(parameters, 2e-3)
    nn.utils.clip_grad_value_(parameters, 1e-3)


def total_norm(parameters: list[Any]) -> Any:
    """Clips nothing."""
    return nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])


def backward(model: Any) -> None:
    """Gives the parameters gradients."""
    batch = CHAIN.batch(6, 0)
    CHAIN.loss_of(model(*batch[0], **batch[1]), batch).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("clip", [clip_by_norm, clip_by_value, total_norm])
@pytest.mark.parametrize("what", LISTS)
def test_clipping_is_as_in_plain_pytorch(what: str, clip: Callable[[list[Any]], Any], setup: str) -> None:
    """Once, it was refused, for it would have clipped by the norm of one rank."""

    def run(model: Any, optimizer: Any, rank: int) -> tuple[Any, dict[str, Tensor]]:
        backward(model)
        found = clip(list(LISTS[what](model, optimizer)))
        return found, gradients_of(model)

    plain = CHAIN.model()
    norms, expected = run(plain, adamw(plain.parameters()), 0)
    for found, gradients in on_ranks(SETUPS[setup], CHAIN.model(), run, adamw, TOKEN):
        torch.testing.assert_close(found, norms)
        torch.testing.assert_close(gradients, {name: expected[name] for name in gradients})


def test_a_parameter_without_gradient_counts_nothing() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> Any:
        backward(model)
        first = next(iter(model.parameters()))
        if not first.is_meta:
            first.grad = None
        return clip_by_norm(list(model.parameters()))

    plain = CHAIN.model()
    expected = run(plain, None, 0)
    for found in on_ranks(SETUPS["two"], CHAIN.model(), run, adamw, TOKEN):
        torch.testing.assert_close(found, expected)


def test_norms_that_are_not_finite_raise_on_every_rank() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        backward(model)
        first = next(iter(model.parameters()))
        first.grad.fill_(torch.inf)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    on_ranks(SETUPS["two"], CHAIN.model(), run, adamw, TOKEN)


def test_ranks_that_leave_out_what_is_elsewhere_hear_of_it() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        backward(model)
        with pytest.raises(RankError, match=r"got a list on rank 0 without that of .*which another rank has"):
            nn.utils.clip_grad_norm_([each for each in model.parameters() if not each.is_meta], 1.0)

    on_ranks(SETUPS["two"], CHAIN.model(), run, adamw, TOKEN)


def test_what_is_computed_from_gradients_is_not_joined() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        backward(model)
        with pytest.raises(InputError, match=rf"Rank {rank} does not hold"):
            float(nn.utils.get_total_norm([each.grad * 2 for each in model.parameters()]))

    on_ranks(SETUPS["two"], CHAIN.model(), run, adamw, TOKEN)


def test_ranks_that_clip_to_other_norms_hear_of_it() -> None:
    """At their next norm, for clipping itself asks nobody."""

    def run(model: Any, optimizer: Any, rank: int) -> None:
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 + rank)
        with pytest.raises(RankError, match=r"max_norm of the last clipping is 1 on rank 0, 2 on rank 1"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    on_ranks(SETUPS["two"], CHAIN.model(), run, adamw, TOKEN)
