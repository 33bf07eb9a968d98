"""What ranks owe each other: differences are errors on all; ends and metrics are known to all."""

from __future__ import annotations

import ast
import copy
import logging
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna, CheckpointError, ConfigError, InputError, RankError
from autovaruna.elastic.rank_script import SAVED
from autovaruna.ranks.transport.base import TensorTransfer
from autovaruna.ranks.transport.threads import Mailboxes, ThreadTransport
from autovaruna.ranks.world import World
from tests.catalogue.small import WIDTH, Classifier, Written, hidden, labelled, two_layers
from tests.products import some
from tests.rank_threads import RankThread, run_ranks
from tests.session.training import QUIET, descend, trace_shared


@pytest.fixture(autouse=True)
def _equal_models_are_traced_once(request: pytest.FixtureRequest) -> Iterator[None]:
    with trace_shared(request.node.nodeid):
        yield


BATCH = labelled(6, 0)[1]
REPLICAS = QUIET | {"num_stages": 1, "num_replicas": 2}
Optimizer = torch.optim.Optimizer


def net(num_layers: int = 2) -> nn.Module:
    return Classifier(hidden(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))))


def sgd(model: nn.Module, lr: float = 0.1) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def two_groups(model: nn.Module) -> Optimizer:
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.1)


OF_RANK_1: dict[str, tuple[Callable[[nn.Module], Optimizer | None], str]] = {
    "no optimizer": (lambda model: None, "the optimizer is SGD on rank 0, none on rank 1"),
    "another optimizer": (lambda model: torch.optim.Adam(model.parameters()), "SGD on rank 0, Adam on rank 1"),
    "another rate": (lambda model: sgd(model, 0.2), r"lr of the optimizer's group 0 is 0\.1 on rank 0, 0\.2 on rank 1"),
    "other groups": (two_groups, "parameters of the optimizer's group 0 is .8 from .* on rank 0, .1 from .* on rank 1"),
}


@pytest.mark.parametrize("what", OF_RANK_1)
def test_optimizers_that_differ_are_told_before_the_first_step(what: str) -> None:
    make, words = OF_RANK_1[what]

    def be_rank(world: World) -> None:
        model = net()
        wrapped = AutoVaruna(model, make(model) if world.rank == 1 else sgd(model), **REPLICAS)
        with pytest.raises(RankError, match=words):
            wrapped(**BATCH)

    run_ranks(2, be_rank)


ACTS: tuple[tuple[str, Callable[[AutoVaruna, Optimizer], Any]], ...] = (
    (
        r"lr of the optimizer's group 0 is 0\.1 on rank 0, 0\.05.* mean over the ranks: autovaruna\.init",
        lambda _, own: own.param_groups[0].update(lr=0.05),
    ),
    (r"number of steps of the optimizer is 0 on rank 0, 1 on rank 1", lambda model, optimizer: optimizer.step()),
    (r"calls of its zero_grad\(\) is 0 on rank 0, 1", lambda model, optimizer: optimizer.zero_grad()),
    (
        r"number of load_state_dict\(\) is missing on rank 0, 1",
        lambda model, _: model.load_state_dict({}, strict=False),
    ),
)


def test_what_one_rank_does_alone_is_told_until_the_others_do_it_too() -> None:
    """Once, such ranks trained copies that differed: a learning rate, a step, or a ``zero_grad`` of one rank alone."""

    def be_rank(world: World) -> None:
        model = net()
        optimizer = sgd(model)
        wrapped = AutoVaruna(model, optimizer, **REPLICAS)
        wrapped(**BATCH).backward()
        for words, act in ACTS:
            if world.rank == 1:
                act(wrapped, optimizer)
            with pytest.raises(RankError, match=words):
                wrapped(**BATCH)
            if world.rank == 0:
                act(wrapped, optimizer)
            wrapped(**BATCH).backward()
        with pytest.raises(RankError, match="max_norm is 1 on rank 0, 2 on rank 1"):
            wrapped.clip_grad_norm_(1.0 + world.rank)
        second = AutoVaruna(copy.deepcopy(model), **REPLICAS)
        second(**BATCH).backward()
        own = second if world.rank else wrapped
        with pytest.raises(RankError, match=r"is in 'clip_grad_norm_', rank 1 is in 'clip_grad_norm_ \(model 2\)'"):
            own.clip_grad_norm_(1.0)
        with pytest.raises(RankError, match=r"inputs\", rank 1 is in \"reading the model's inputs \(model 2\)\""):
            own(**BATCH)

    run_ranks(2, be_rank)


def test_backwards_in_another_order_are_told() -> None:
    """Once, each rank took the other one's gradients for those of its own call."""

    def be_rank(world: World) -> None:
        wrapped = AutoVaruna(hidden(), **REPLICAS)
        losses = [wrapped(BATCH["x"]).sum() for _ in range(2)]
        losses[world.rank].backward()

    with pytest.raises(RankError, match=r"outputs of call 1 that .*outputs of call 2 that"):
        run_ranks(2, be_rank)


def pass_batches(numbers: Callable[[int, int], float], steps: int = 3, changes: bool = True, **settings: Any) -> None:
    """Trains on batches whose first number is given by rank and step; the others change by step alone, or never."""

    def be_rank(world: World) -> None:
        own = net()
        model = AutoVaruna(own, sgd(own), **{**REPLICAS, "inputs": "replicated", **settings})
        for step in range(steps):
            batch = labelled(6, int(changes and step % 2 == 0))[1]
            batch["x"][0, 0] = numbers(world.rank, step)
            model(**batch).backward()

    run_ranks(2, be_rank)


@pytest.mark.parametrize("first_step", [0, 1, 64])
def test_a_batch_that_is_not_the_same_on_ranks_that_share_it_is_refused(first_step: int) -> None:
    """Once, a loader that was seeded otherwise on each rank trained with the inputs of one batch, labels of another."""
    with pytest.raises(RankError, match=r"ranks \[0, 1\] pass other numbers in x: a step"):
        pass_batches(lambda rank, step: rank * float(step == first_step), first_step + 1)
    if first_step == 1:
        pass_batches(lambda rank, step: 0.0)


SHARED: dict[str, tuple[Callable[[int, int], float], dict[str, Any], int]] = {
    "same": (lambda rank, step: float(step), {}, 1),
    "other": (lambda rank, step: float(rank), {}, 0),
    "the second is another": (lambda rank, step: float(rank * step), {}, 0),
    "a batch that never changes": (lambda rank, step: 0.0, {"changes": False}, 0),
    "shared": (lambda rank, step: float(step), {"inputs": "replicated"}, 0),
    "one replica": (lambda rank, step: float(step), {"inputs": "per_replica", "stage_ranks": [[0], [1]]}, 0),
    "two replicas": (lambda rank, step: float(step), {"inputs": "per_replica", "stage_ranks": [[0, 1]]}, 1),
}


@pytest.mark.parametrize("kind", SHARED)
def test_ranks_that_pass_the_same_samples_are_told_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once, loaders that all ranks seed alike trained on each sample twice, with losses that look right."""
    numbers, settings, times = SHARED[kind]
    if "stage_ranks" in settings:
        settings = {"num_stages": 0, "num_replicas": 0, **settings}
    pass_batches(numbers, **{"inputs": "per_rank", **settings})
    assert caplog.text.count("ranks [0, 1] pass the same samples") == times
    assert times == 0 or all(name in caplog.text for name in ("ElasticSampler", "DistributedSampler", "replicated"))


def with_table(self: Any, x: Tensor, y: Tensor, table: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    return (self.last(self.first(x) + table.sum(0)).squeeze(1) - y).square().mean(), number + 1


def test_a_table_as_long_as_the_batch_is_told_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """Once, its rows were taken for those of samples, and its sum was another, without a word."""
    torch.manual_seed(0)
    table, xs, ys = torch.randn(6, WIDTH), torch.randn(12, WIDTH), torch.randn(12)
    plain = two_layers(with_table, last=nn.Linear(WIDTH, 1))
    expected = plain(xs, ys, table, torch.tensor(3))[0].item()
    models = [copy.deepcopy(plain) for _ in range(2)]

    def be_rank(world: World, **settings: Any) -> tuple[float, int]:
        model = AutoVaruna(copy.deepcopy(models[world.rank]), **{**REPLICAS, "num_micro_batches": 4, **settings})
        own = slice(6 * world.rank, 6 * world.rank + 6)
        loss, number = model(xs[own], ys[own], table, torch.tensor(3))
        return loss.item(), int(number)

    with pytest.raises(InputError, match=r"table is as long as the batch.*adds them up.*batch_inputs=") as caught:
        run_ranks(2, be_rank)
    assert sum("table is as long as the batch" in each for each in caplog.messages) == 1
    (names,) = (each.rpartition("batch_inputs=")[2] for each in caplog.messages if "batch_inputs=" in each)
    assert str([*ast.literal_eval(names)]) in str(caught.value)
    for loss, number in run_ranks(2, partial(be_rank, batch_inputs=ast.literal_eval(names))):
        assert loss == pytest.approx(expected, rel=1e-5) and number == 4  # once, one more for each micro-batch
    assert sum("table is as long as the batch" in each for each in caplog.messages) == 1


PATIENCE_SECONDS = 200.0


class Held(TensorTransfer):
    """A message that leaves once its sender has asked for it some times, after those before it."""

    needs_calls, has_left = True, False

    def __init__(self, transport: Lazy, send: Callable[[], object]) -> None:
        self._transport, self.send = transport, send

    def is_done(self) -> bool:
        if not self.has_left:
            self._transport.advance()
        return self.has_left


class Lazy(RankThread):
    """Moves nothing but while it is called, and then not at once: each message, or notice, is held for some calls."""

    def __init__(self, rank: int, mailboxes: Mailboxes, seed: int) -> None:
        super().__init__(rank, mailboxes)
        self._random = random.Random(seed * 1000 + rank)
        self._held: list[Held] = []
        self._num_calls = 0

    def _hold(self, send: Callable[[], object]) -> Held:
        self._held.append(Held(self, send))
        return self._held[-1]

    def post_send(self, tensor: Tensor, destination: int, channel: int, tag: int) -> TensorTransfer:
        if self._random.random() < 0.3 and not self._held:
            return super().post_send(tensor, destination, channel, tag)
        return self._hold(lambda: ThreadTransport.post_send(self, tensor, destination, channel, tag))

    def send_notice(self, data: bytes, destination: int) -> None:
        self._hold(lambda: ThreadTransport.send_notice(self, data, destination))

    def poll_notices(self) -> Iterator[tuple[int, bytes]]:
        self.advance()
        yield from super().poll_notices()

    def are_notices_out(self) -> bool:
        self.advance()
        return not self._held

    def advance(self) -> None:
        if self._num_calls > 0:
            self._num_calls -= 1
        elif self._held:
            self._num_calls = self._random.randrange(6)
            first = self._held.pop(0)
            first.send()
            first.has_left = True


def network(loss_in_model: bool) -> nn.Module:
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4)]
    net = nn.Sequential(*layers)
    return Written(lambda self, x: self.net(x).square().mean(), net=net) if loss_in_model else net


def train(world: World, net: nn.Module, meet: Callable[[], object], loss_in_model: bool) -> list[float]:
    """Does all that a script does in a step, and meets the others after each."""
    net, draws = copy.deepcopy(net), torch.Generator().manual_seed(1 + world.rank)
    optimizer = torch.optim.Adam(net.parameters())
    replicas = [[0, 1], [2]] if loss_in_model else [[0], [1], [2]]
    cuts = ["net.4"] if loss_in_model else ["2", "4"]
    model = AutoVaruna(net, optimizer, stage_ranks=replicas, num_micro_batches=6, cuts=cuts, **QUIET)
    losses = []
    for step in range(3):
        out = model(torch.randn(8, 8, generator=draws))
        meet()
        loss = out if loss_in_model else out.square().mean()
        loss.backward()
        meet()
        model.clip_grad_norm_(1.0)
        meet()
        optimizer.step()
        meet()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            with model.no_sync():
                out = model(torch.randn(8, 8, generator=draws))
                (out if loss_in_model else out.square().mean()).backward()
            meet()
            model.allreduce_grads()
            meet()
    for act in (model.state_dict, model.optimizer_state_dict, lambda: world.barrier("end")):
        act()
        meet()
    return losses


@pytest.mark.parametrize(("seed", "loss_in_model"), some([(0, False), (2, False), (1, True), (3, True)], 2))
def test_ranks_may_wait_for_each_other_after_any_call(seed: int, loss_in_model: bool, monkeypatch: Any) -> None:
    def lazy_worlds(num_ranks: int, hosts: str) -> list[World]:
        mailboxes = Mailboxes(num_ranks)
        return [World(Lazy(rank, mailboxes, seed)) for rank in range(num_ranks)]

    net = network(loss_in_model)
    expected = run_ranks(3, lambda world: train(world, net, lambda: None, loss_in_model))
    monkeypatch.setattr("tests.rank_threads.make_worlds", lazy_worlds)
    barrier = threading.Barrier(3, timeout=PATIENCE_SECONDS)
    assert run_ranks(3, lambda world: train(world, net, barrier.wait, loss_in_model)) == expected


torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def wrap(**settings: Any) -> tuple[AutoVaruna, Callable[[], None]]:
    """Returns a model, and what makes a step with it."""
    net = copy.deepcopy(NET)
    optimizer = sgd(net)
    model = AutoVaruna(net, optimizer, **QUIET, **settings)
    return model, lambda: descend(model(torch.ones(2, 4)).mean(), optimizer)


def test_all_ranks_stop_after_the_call_that_tells_them() -> None:
    """Rank 1 wants to stop in step 2; all know after the call of step 3, and for good."""

    def run(world: World) -> list[bool]:
        model, act = wrap()
        answers = []
        for step in range(5):
            act()
            answers.append(model.should_stop(world.rank == 1 and step == 2))
        return answers

    assert run_ranks(2, run) == [[False, False, False, True, True]] * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_is_saved_once_the_optimizer_has_stepped(num_ranks: int, tmp_path: Path) -> None:
    """Gradients of two calls are accumulated for a step; what one of them has left behind is in no checkpoint."""

    def run(world: World) -> bool:
        model, act = wrap(save_on_signal=str(tmp_path))
        for call in range(6):
            model.should_stop(call == 5 and world.rank == 0)
            act() if call % 2 else model(torch.ones(2, 4)).mean().backward()
        with pytest.raises(SystemExit, match=str(SAVED)):
            model(torch.ones(2, 4))
        return model.should_stop()

    assert run_ranks(num_ranks, run) == [True] * num_ranks
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]


def test_what_cannot_be_saved_is_an_error_with_what_can_be_loaded(tmp_path: Path) -> None:
    """The folder of checkpoints is another job's; the status is not that of a run that has saved."""

    def run(world: World, is_taken: bool) -> None:
        model, act = wrap(save_on_signal=str(tmp_path))
        for _ in range(3):
            model.should_stop(True)
            act()
            if is_taken and world.rank == 0:
                (tmp_path / ".claim").unlink()
                (tmp_path / ".claim").mkdir()

    for is_taken, error in ((False, SystemExit), (True, CheckpointError)):
        with pytest.raises(error) as caught:
            run_ranks(2, lambda world, is_taken=is_taken: run(world, is_taken))
    assert "The newest step that can be loaded is 1: " in str(caught.value)


def test_the_scripts_numbers_go_on(tmp_path: Path) -> None:
    """A run that has saved its step 10 saves step 11 a step later; one that has loaded it saves 12 two steps later."""

    def run(world: World, is_first: bool) -> None:
        model, act = wrap(save_on_signal=str(tmp_path))
        if not is_first:
            model.load_checkpoint(str(tmp_path), step=10)
        for number in range(4):
            act()
            if number == 0 and is_first:
                model.save_checkpoint(str(tmp_path), step=10)
            model.should_stop(number == 1)

    for is_first in (True, False):
        with pytest.raises(SystemExit):
            run_ranks(2, lambda world, first=is_first: run(world, first))
    assert {path.name[:13] for path in tmp_path.glob("step-*")} == {f"step-000000{step}" for step in (10, 11, 12)}


def test_several_models_are_refused(tmp_path: Path) -> None:
    def run(world: World) -> None:
        for model, _ in (wrap(save_on_signal=str(tmp_path)), wrap(save_on_signal=str(tmp_path))):
            model(torch.ones(2, 4))

    with pytest.raises(ConfigError, match=r"expected one model.*should_stop\(\)"):
        run_ranks(2, run)


@pytest.mark.parametrize("has_loss", [True, False])
def test_a_loss_that_is_not_finite_is_told_once(has_loss: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A sample of rank 1 is not a number in step 2 and on; a loss of the script's own is each rank's."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net = Written(lambda self, x: self.net(x).square().mean(), net=layers) if has_loss else layers

    def run(world: World) -> list[Any]:
        own = copy.deepcopy(net)
        model = AutoVaruna(own, sgd(own), stage_ranks=[[0], [1]], num_micro_batches=4, **QUIET)
        said = [(model.metrics.step, model.metrics.loss, model.metrics.is_finite)]
        for step in range(4):
            x = torch.ones(4, 4)
            if step and world.rank == 1:
                x[3, 1] = float("nan")
            out = model(x)
            loss = out if has_loss else out.square().mean()
            loss.backward()
            metrics = model.metrics
            assert metrics.step == step + 1
            assert metrics.loss == pytest.approx(loss.item(), nan_ok=True) if has_loss else metrics.loss is None
            said.append(metrics.is_finite)
        return said

    with caplog.at_level(logging.WARNING, "autovaruna.runtime.metrics"):
        first, second = run_ranks(2, run)
    assert first[0] == second[0] == (0, None, None)
    assert second[1:] == [True, False, False, False]
    assert first[1:] == (second[1:] if has_loss else [True] * 4)
    (line,) = (record.getMessage() for record in caplog.records if record.name == "autovaruna.runtime.metrics")
    assert line.startswith("step 2: ") and "stage 1" in line and "rank 1" in line
    assert ("micro-batch 3 (samples 2 to 3 of rank 1) is nan" in line) == has_loss
