"""State under the model's own names, before and after the first step, at any number of ranks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from autovaruna import AutoVaruna, InputError, RankError, load_checkpoint
from autovaruna.runtime.step import Step
from tests.catalogue import CASES, Batch, Case
from tests.catalogue.small import CLASSES, WIDTH, Written, hidden, labelled
from tests.collector import spare_collector
from tests.products import diagonal
from tests.reference import OPTIMIZERS, Record, adamw, bit_equal, compare, plain_steps, sgd
from tests.session.training import QUIET, Setup, as_plain, descend, on_ranks, pipeline, same_gradients, train_rank

SETUPS = {"one": Setup(), "two": pipeline(2), "replicas": Setup(((0,), (1, 2))), "interleaved": Setup(((0,), (1,)) * 2)}
Optimizer = torch.optim.Optimizer


def batches_of(case: Case, num: int) -> list[Batch]:
    return [case.batch(7, step) for step in range(num)]


def halfway(case: Case, setup: Setup, make: Callable[[Any], Optimizer]) -> tuple[dict[str, Any], dict[str, Any]]:
    def run(model: AutoVaruna, optimizer: Optimizer, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        train_rank(case, model, optimizer, batches_of(case, 2))
        return model.state_dict(), model.optimizer_state_dict()

    states = on_ranks(setup, case, run, make)
    for other in states[1:]:
        same_state(other[0], states[0][0])
        same_state(other[1]["state"], states[0][1]["state"])
    return copy.deepcopy(states[0])


same_state = partial(torch.testing.assert_close, rtol=0, atol=0, check_device=False)


@pytest.mark.parametrize(("before", "target"), diagonal(product([*SETUPS][1:], [False, True]), [*SETUPS, "one", "two"]))
def test_a_run_goes_on_with_another_partition(before: tuple[str, bool], target: str) -> None:
    """It may have made a step of its own before the state is loaded."""
    source, is_started = before
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


NAMES = ("tied", "frozen", "unused_parameter", "lstm", "moving_average", "constant", "conv_net_batch_norm")


@pytest.mark.parametrize(("way", "name"), diagonal(product(SETUPS, OPTIMIZERS), NAMES))
def test_states_have_the_keys_of_plain_pytorch_and_load_into_it(way: tuple[str, str], name: str) -> None:
    case, (setup, optimizer) = CASES[name].without_dropout(), way
    weights, moments = halfway(case, SETUPS[setup], OPTIMIZERS[optimizer])
    model = case.model()
    plain = OPTIMIZERS[optimizer](model.parameters())
    plain_steps(case, batches_of(case, 2), lambda _: plain, model=model)
    assert list(weights) == list(model.state_dict())
    assert moments["state"].keys() == plain.state_dict()["state"].keys()
    assert moments["param_groups"] == plain.state_dict()["param_groups"]
    model.load_state_dict(weights)
    plain.load_state_dict(moments)


def test_a_missing_or_unexpected_key_is_refused() -> None:
    case = CASES["chain"]

    def run(model: AutoVaruna, optimizer: Optimizer, rank: int) -> Any:
        train_rank(case, model, optimizer, batches_of(case, 1))
        state = model.state_dict()
        del state["body.0.weight"]
        with pytest.raises(RuntimeError, match=r"Missing key.*body\.0\.weight"):
            model.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*more"):
            model.load_state_dict({**state, "more": torch.zeros(1)})
        return model.load_state_dict(state, strict=False)

    for result in on_ranks(pipeline(2), case, run):
        assert result.missing_keys == ["body.0.weight"] and result.unexpected_keys == []


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

    for state in on_ranks(Setup(((0,), (1, 2))), case, run):
        same_state(dict(state), expected)


def test_evaluation_between_steps_changes_nothing() -> None:
    case = CASES["conv_net_batch_norm"]

    def run(model: AutoVaruna, optimizer: Optimizer, rank: int) -> Any:
        record = train_rank(case, model, optimizer, batches_of(case, 1))
        model.eval()
        with torch.inference_mode():
            losses = [model(**case.batch(size, 5)[1]).item() for size in (7, 3, 1)]
        model.train()
        return record, train_rank(case, model, optimizer, [case.batch(7, 1)]), losses

    one, *_ = on_ranks(Setup(), case, run)
    for setup in (pipeline(3), Setup(((0,), (1,)) * 2)):
        for record in on_ranks(setup, case, run):
            assert record[2] == one[2]
            bit_equal(Record(losses=record[1].losses), Record(losses=one[1].losses))
            same_state(record[1].buffers, one[1].buffers)
    model = case.model()
    model.load_state_dict({**one[0].weights, **one[0].buffers})
    with torch.no_grad():
        expected = [model.eval()(**case.batch(size, 5)[1]).item() for size in (7, 3, 1)]
    assert one[2] == pytest.approx(expected, rel=1e-5)


def scaled_mean(self: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(self.kernel(x)).mean((2, 3))
    return ((self.last(hidden) + hidden @ self.other) * self.scale).square().mean()


def ordered(kind: str) -> nn.Module:
    """Has a kernel with its channels last, an expanded buffer, or a weight that is a part of another tensor."""
    other = torch.randn(4, 9)[:, 2:7] if kind == "sliced" else torch.randn(4, 5)
    scale = torch.full((1,), 0.5).expand(5) if kind == "expanded" else torch.ones(5)
    parts = {"kernel": nn.Conv2d(3, 4, 3), "last": nn.Linear(4, 5), "other": nn.Parameter(other), "scale": scale}
    memory_format = torch.channels_last if kind == "channels_last" else torch.preserve_format
    return Written(scaled_mean, **parts).to(memory_format=memory_format)


@pytest.mark.parametrize("kind", ["channels_last", "expanded", "sliced"])
def test_every_rank_has_the_same_whole_state(kind: str) -> None:
    """The state after two steps is that of plain PyTorch on every rank, to the bit, and loads back."""
    x = torch.randn(4, 3, 6, 6)

    def story(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        for _ in range(2):
            descend(model(x), optimizer)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        if kind != "expanded":  # which plain PyTorch cannot load
            model.load_state_dict(state)
        same_state(dict(model.state_dict()), state)
        moments = [values["momentum_buffer"] for values in optimizer.state_dict()["state"].values()]
        return state | {f"moment {place}": value for place, value in enumerate(moments)}

    as_plain(pipeline(2, num_micro_batches=1), ordered(kind), story, rtol=0, atol=0)


BATCH = labelled(6, 0)[1]["x"]


@pytest.mark.parametrize("grows_after", [0, 1])
def test_an_added_group_trains_and_is_saved(grows_after: int) -> None:
    """Once, one more group before the first call was a bare ``ValueError``, and one after it was left out of states."""

    def story(model: Any, optimizer: Optimizer) -> Any:
        for number in range(3):
            if number == grows_after:
                optimizer.add_param_group({"params": list(model.parameters())[:2], "lr": 0.3})
            descend(model(BATCH).square().mean(), optimizer)
        moments = getattr(model, "optimizer_state_dict", optimizer.state_dict)()
        assert [group["lr"] for group in moments["param_groups"]] == [0.1, 0.3]
        return model.state_dict(), moments["state"]

    net = hidden()
    last = lambda parameters: torch.optim.Adam(list(parameters)[2:], lr=0.1)  # noqa: E731
    as_plain(pipeline(2, num_micro_batches=1), net, story, last)


@pytest.mark.parametrize("loss_mode", ["loss", "outputs"])
def test_a_step_leaves_nothing_to_the_garbage_collector(loss_mode: str) -> None:
    """What a step held, the outputs of every micro-batch among it, is gone with the results that the caller drops."""
    case = CASES["loss_and_scores"]
    wrapped = AutoVaruna(case.model(), num_micro_batches=2, loss_mode=loss_mode, **QUIET)
    for _ in range(2):
        spare_collector()  # threads of an earlier test may still be ending
        gc.disable()
        try:
            wrapped(**case.batch(6, 0)[1])["loss"].backward()
            left = [each for each in gc.get_objects() if isinstance(each, Step)]
        finally:
            gc.enable()
    assert not left


def test_an_added_group_of_another_model_is_refused() -> None:
    net = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = AutoVaruna(net, optimizer, **QUIET, num_micro_batches=2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(InputError, match="1 of the optimizer's 3 parameters are not the model's"):
        model(BATCH)


def test_what_a_script_sets_after_load_checkpoint_stays(tmp_path: Path) -> None:
    """Once, the first call, which reads the optimizer's state, read its options and state again over the script's."""
    net = hidden(nn.Tanh())

    def save(model: AutoVaruna, optimizer: Optimizer, rank: int) -> dict[str, Any]:
        descend(model(BATCH).square().mean(), optimizer)
        first = copy.deepcopy(model.optimizer_state_dict())
        descend(model(BATCH).square().mean(), optimizer)
        model.save_checkpoint(tmp_path, step=2)
        return first

    first = on_ranks(pipeline(2, num_micro_batches=1), net, save)[0]
    for loads_state in (False, True):

        def story(model: Any, optimizer: Any, loads_state: bool = loads_state) -> Any:
            if isinstance(model, AutoVaruna):
                model.load_checkpoint(tmp_path)
            else:
                model = copy.deepcopy(model)
                optimizer = sgd(model.parameters())
                load_checkpoint(tmp_path, model, optimizer)
            if loads_state:
                optimizer.load_state_dict(copy.deepcopy(first))
            optimizer.param_groups[0]["lr"] = 0.01
            descend(model(BATCH).square().mean(), optimizer)
            return model.state_dict(), optimizer.state_dict()

        as_plain(pipeline(2, num_micro_batches=1), net, story)


def test_parameters_of_an_optimizer_in_another_order_keep_their_state() -> None:
    """Once, the state of each was given and saved as that of another one."""

    def story(model: Any, optimizer: Any) -> Any:
        descend(model(BATCH).square().mean(), optimizer)
        optimizer.param_groups[0]["params"].reverse()
        descend(model(BATCH).square().mean(), optimizer)
        return model.state_dict(), optimizer.state_dict()

    net = hidden(nn.Tanh())
    as_plain(pipeline(2, num_micro_batches=1), net, story)


def test_a_first_replica_without_samples_takes_the_buffers_of_the_next_one() -> None:
    """Once, all ranks got those that it had before the call, which no samples had changed."""
    batches = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def run(model: Any, optimizer: Any, rank: int) -> Any:
        for number, batch in enumerate(batches):
            own = batch if rank < 0 or number % 2 == rank else batch[:0]
            descend(model(own).square().mean() if rank < 0 else model(own).square().sum() / 4 / CLASSES, optimizer)
        return model.state_dict()

    net = hidden(nn.BatchNorm1d(WIDTH))
    setup = Setup(((0, 1),), num_micro_batches=2, settings={"inputs": "per_rank"})
    found = on_ranks(setup, net, run, sgd)
    expected = run(net, sgd(net.parameters()), -1)
    for state in found:
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)


class Masked(nn.Linear):
    """Takes a mask, if there is one."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.arange(float(WIDTH)))

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        return found if self.mask is None else found * self.mask


class Turned(Masked):
    def forward(self, input: Tensor) -> Tensor:
        return -super().forward(input).exp()


@pytest.mark.parametrize(("name", "value"), [("mask", None), ("__class__", Turned)])
def test_a_buffer_that_is_gone_and_another_class_are_another_trace(name: str, value: Any) -> None:
    def act(model: Any) -> None:
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
        model(x).square().mean().backward()
        setattr(getattr(model, "module", model)[0], name, value)
        model(x).square().mean().backward()

    same_gradients(Setup(num_micro_batches=2), nn.Sequential(Masked(), nn.Linear(WIDTH, WIDTH)), act)


def test_a_buffer_that_comes_later_and_parameters_that_change_their_names_are_refused() -> None:
    """Once, a model went on without a buffer whose name had been registered as None.

    The end of pruning gives a weight its old name back; once, that was a KeyError, then one in the next step of any
    optimizer.
    """
    net, x = nn.Sequential(Masked(), nn.Linear(WIDTH, WIDTH)), torch.ones(4, WIDTH)
    net[0].mask = None
    prune.l1_unstructured(net[1], "weight", 0.5)
    model = AutoVaruna(net, torch.optim.SGD(net.parameters(), lr=0.1), num_micro_batches=2, **QUIET)
    model(x)
    net[0].mask = torch.ones(WIDTH)
    with pytest.raises(InputError, match=r"0\.mask came after the first call: register it"):
        model(x)
    net[0].mask = None
    prune.remove(net[1], "weight")
    other = nn.Linear(WIDTH, 1)
    other(x).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    with pytest.raises(InputError, match=r"replaced after the first call: got other ones for .*1\.weight"):
        model(x)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_state_that_one_rank_alone_collects_says_what_to_write(goes_on: bool) -> None:
    """The habit of DistributedDataParallel, where each rank has all weights: ``if rank == 0: torch.save(...)``."""

    def run(wrapped: AutoVaruna, optimizer: Any, rank: int) -> None:
        x = torch.ones(4, WIDTH)
        wrapped(x)
        if rank == 0:
            wrapped.state_dict()
        elif goes_on:
            wrapped(x)

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(RankError, match=r"state = model\.state_dict\(\) on every rank.*torch\.save.* on one"):
        on_ranks(pipeline(2), net, run, timeout=20.0 if goes_on else 60.0)
