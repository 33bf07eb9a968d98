"""State under the model's own names, before and after the first step, at any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autovaruna import AutoVaruna
from tests.catalogue import CASES, Batch, Case
from tests.reference import (
    OPTIMIZERS,
    Record,
    adamw,
    bit_equal,
    compare,
    part,
    plain_micro_batched,
    plain_steps,
    ranges,
    sgd,
)
from tests.session.training import Setup, on_ranks, pipeline, train, train_rank

SETUPS = {"one": Setup(), "two": pipeline(2), "replicas": Setup(((0,), (1, 2))), "interleaved": Setup(((0,), (1,)) * 2)}
Optimizer = torch.optim.Optimizer


def batches_of(case: Case, num: int) -> list[Batch]:
    """Returns batches of seven."""
    return [case.batch(7, step) for step in range(num)]


def halfway(case: Case, setup: Setup, make: Callable[[Any], Optimizer]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the states of model and optimizer after two steps."""

    def run(model: AutoVaruna, optimizer: Optimizer, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        train_rank(case, model, optimizer, batches_of(case, 2))
        return model.state_dict(), model.optimizer_state_dict()

    states = on_ranks(setup, case.model(), run, make, token=(case.name, case.has_dropout))
    for other in states[1:]:
        same_state(other[0], states[0][0])
        same_state(other[1]["state"], states[0][1]["state"])
    return copy.deepcopy(states[0])


def same_state(got: Any, expected: Any) -> None:
    """Asserts that two nested states hold the same keys and bits."""
    if isinstance(expected, Tensor):
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            same_state(got[key], value)
    else:
        assert got == expected


@pytest.mark.parametrize("target", SETUPS)
@pytest.mark.parametrize("source", SETUPS)
@pytest.mark.parametrize("is_started", [False, True], ids=["before", "after"])
def test_a_run_goes_on_with_another_partition(source: str, target: str, is_started: bool) -> None:
    case = CASES["tied_three_ways"]
    saved = halfway(case, SETUPS[source], adamw)

    def go_on(model: AutoVaruna, optimizer: Optimizer, rank: int) -> Any:
        if is_started:
            train_rank(case, model, optimizer, [case.batch(7, 9)])
        weights, moments = copy.deepcopy(saved)  # optimizers keep the tensors that they load, and threads share them
        model.load_state_dict(weights)
        model.load_optimizer_state_dict(moments)
        return train_rank(case, model, optimizer, [case.batch(7, 2)])

    found = on_ranks(SETUPS[target], case.model(1), go_on, adamw, token=(case.name, case.has_dropout))[0]
    expected = plain_steps(case, batches_of(case, 3), adamw)
    compare(Record(weights=found.weights), Record(weights=expected.weights))


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_state_loads_into_the_plain_model(setup: str, optimizer: str) -> None:
    case = CASES["conv_net_batch_norm"]
    weights, moments = halfway(case, SETUPS[setup], OPTIMIZERS[optimizer])
    model = case.model(1)
    model.load_state_dict(weights)
    plain = OPTIMIZERS[optimizer](model.parameters())
    plain.load_state_dict(moments)
    assert list(weights) == list(model.state_dict())
    assert len(plain.state) == len(list(model.parameters()))
    assert weights["body.1.num_batches_tracked"] == 2


@pytest.mark.parametrize("name", ["tied", "frozen", "unused_parameter", "lstm", "moving_average", "constant"])
def test_states_have_the_keys_of_plain_pytorch(name: str) -> None:
    case = CASES[name].without_dropout()
    weights, moments = halfway(case, pipeline(2), sgd)
    model = case.model()
    optimizer = sgd(model.parameters())
    for batch in batches_of(case, 2):
        case.loss_of(model(*batch[0], **batch[1]), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert list(weights) == list(model.state_dict())
    expected = optimizer.state_dict()
    assert moments["state"].keys() == expected["state"].keys()
    assert moments["param_groups"] == expected["param_groups"]


def test_groups_and_their_settings_are_kept() -> None:
    case = CASES["chain"]

    def groups(parameters: Any) -> Optimizer:
        every = list(parameters)
        return torch.optim.SGD([{"params": every[:2], "lr": 0.1}, {"params": every[2:]}], lr=0.01, momentum=0.9)

    def run(model: AutoVaruna, optimizer: Optimizer, rank: int) -> Any:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for batch in batches_of(case, 3):
            train_rank(case, model, optimizer, [batch])
            scheduler.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        return rates, [group["params"] for group in model.optimizer_state_dict()["param_groups"]], model.state_dict()

    for rates, places, weights in on_ranks(pipeline(3), case.model(), run, groups, token=(case.name, False)):
        assert rates == [0.1 / 8, 0.01 / 8] and [len(each) for each in places] == [2, len(weights) - 2]


def test_a_missing_or_unexpected_key_is_refused() -> None:
    case = CASES["chain"]

    def run(model: AutoVaruna, optimizer: Optimizer, rank: int) -> Any:
        train_rank(case, model, optimizer, batches_of(case, 1))
        state = model.state_dict()
        del state["body.0.weight"]
        with pytest.raises(RuntimeError, match=r"missing key body\.0\.weight"):
            model.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"unexpected key more"):
            model.load_state_dict({**state, "more": torch.zeros(1)})
        return model.load_state_dict(state, strict=False)

    for result in on_ranks(pipeline(2), case.model(), run, token=(case.name, False)):
        assert result.missing_keys == ["body.0.weight"] and result.unexpected_keys == []


@pytest.mark.parametrize("setup", [pipeline(2), pipeline(2, recompute=True), pipeline(3, schedule="varuna")])
def test_buffers_are_updated_once_a_micro_batch(setup: Setup) -> None:
    case = CASES["batch_norm"]
    got = train(case, setup, batches_of(case, 3))
    cut = [[part(batch, *bounds) for bounds in ranges(7, 3)] for batch in batches_of(case, 3)]
    compare(Record(buffers=got.buffers), Record(buffers=plain_micro_batched(case, cut).buffers))


def test_weights_start_as_those_of_rank_0() -> None:
    case = CASES["chain"]
    models: Sequence[Any] = [case.model(seed) for seed in range(3)]
    expected = {name: value.clone() for name, value in models[0].state_dict().items()}

    def run(model: AutoVaruna, optimizer: Optimizer, rank: int) -> Any:
        with torch.no_grad():
            for own, given in zip(model.module.parameters(), models[rank].parameters(), strict=True):
                own.copy_(given)
        model.eval()
        with torch.no_grad():
            model(**case.batch(7, 0)[1])
        return model.state_dict()

    for state in on_ranks(Setup(((0,), (1, 2))), case.model(), run, token=(case.name, False)):
        same_state(dict(state), expected)


def test_evaluation_between_steps_changes_nothing() -> None:
    case = CASES["conv_net_batch_norm"]

    def run(model: AutoVaruna, optimizer: Optimizer, rank: int) -> Any:
        record = train_rank(case, model, optimizer, batches_of(case, 1))
        model.eval()
        with torch.no_grad():
            losses = [model(**case.batch(size, 5)[1]).item() for size in (7, 3, 1)]
        model.train()
        return record, train_rank(case, model, optimizer, [case.batch(7, 1)]), losses

    one, *_ = on_ranks(Setup(), case.model(), run, token=(case.name, False))
    for setup in (pipeline(3), Setup(((0,), (1,)) * 2)):
        for record in on_ranks(setup, case.model(), run, token=(case.name, False)):
            assert record[2] == one[2]
            bit_equal(Record(losses=record[1].losses), Record(losses=one[1].losses))
            same_state(record[1].buffers, one[1].buffers)
    model = case.model()
    model.load_state_dict({**one[0].weights, **one[0].buffers})
    with torch.no_grad():
        expected = [model.eval()(**case.batch(size, 5)[1]).item() for size in (7, 3, 1)]
    assert one[2] == pytest.approx(expected, rel=1e-5)
