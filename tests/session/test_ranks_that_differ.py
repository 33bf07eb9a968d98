"""What one rank's script does otherwise is an error on all ranks, not copies of the weights that drift apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, RankError
from autovaruna.runtime.transport.threads import run_ranks
from autovaruna.runtime.world import World
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.session.training import QUIET

BATCH = labelled(6, 0)[1]
REPLICAS = QUIET | {"num_stages": 1, "num_replicas": 2}
Optimizer = torch.optim.Optimizer


class Net(nn.Module):
    """Two layers and a loss, or the output alone."""

    def __init__(self, has_loss: bool = True, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
        self.last = nn.Linear(WIDTH, CLASSES)
        self.has_loss = has_loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.last(self.layers(x))
        return F.cross_entropy(out, y) if self.has_loss else out


def sgd(model: nn.Module, lr: float = 0.1) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def two_groups(model: nn.Module) -> Optimizer:
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.1)


OF_RANK_1: dict[str, tuple[Callable[[nn.Module], Optimizer | None], str]] = {
    "no optimizer": (lambda model: None, "the optimizer is SGD on rank 0, none on rank 1"),
    "another optimizer": (lambda model: torch.optim.Adam(model.parameters()), "SGD on rank 0, Adam on rank 1"),
    "another rate": (lambda model: sgd(model, 0.2), r"lr of the optimizer's group 0 is 0\.1 on rank 0, 0\.2 on rank 1"),
    "other groups": (two_groups, "parameters of the optimizer's group 0 is .6 from .* on rank 0, .1 from .* on rank 1"),
}


@pytest.mark.parametrize("what", OF_RANK_1)
def test_optimizers_that_differ_are_told_before_the_first_step(what: str) -> None:
    make, words = OF_RANK_1[what]

    def be_rank(world: World) -> None:
        model = Net()
        wrapped = AutoVaruna(model, make(model) if world.rank == 1 else sgd(model), **REPLICAS)
        with pytest.raises(RankError, match=words):
            wrapped(**BATCH)

    run_ranks(2, be_rank)


def test_models_that_differ_are_told_by_what_they_hold() -> None:
    def be_rank(world: World) -> None:
        with pytest.raises(RankError, match=r"number of modules is 5 on rank 0, 6 on rank 1; the number of parameters"):
            AutoVaruna(Net(num_layers=2 + world.rank), **REPLICAS)(**BATCH)

    run_ranks(2, be_rank)


def halve(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] /= 2


ACTS: tuple[tuple[str, Callable[[AutoVaruna, Optimizer], Any]], ...] = (
    (r"lr of the optimizer's group 0 is \S+ on rank 0, \S+ on rank 1", lambda model, optimizer: halve(optimizer)),
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
        model = Net()
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
        clips_one_of_two(world, wrapped, AutoVaruna(copy.deepcopy(model), **REPLICAS))

    run_ranks(2, be_rank)


def clips_one_of_two(world: World, first: AutoVaruna, second: AutoVaruna) -> None:
    """Calls two models in another order on each rank."""
    second(**BATCH).backward()
    with pytest.raises(RankError, match=r"rank 0 is in 'clip_grad_norm_', rank 1 is in 'clip_grad_norm_ \(model 2\)'"):
        (second if world.rank else first).clip_grad_norm_(1.0)
    with pytest.raises(RankError, match=r"inputs\", rank 1 is in \"reading the model's inputs \(model 2\)\""):
        (second if world.rank else first)(**BATCH)


def test_backwards_in_another_order_are_told() -> None:
    """Once, each rank took the other one's gradients for those of its own call."""

    def be_rank(world: World) -> None:
        wrapped = AutoVaruna(Net(has_loss=False), **REPLICAS)
        losses = [wrapped(**BATCH).sum() for _ in range(2)]
        losses[world.rank].backward()

    with pytest.raises(RankError, match=r"outputs of call 1 that .*outputs of call 2 that"):
        run_ranks(2, be_rank)


@pytest.mark.parametrize("differs", [True, False])
def test_a_batch_that_is_not_the_same_on_ranks_that_share_it_is_told_once(
    differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, a loader that was seeded otherwise on each rank trained with the inputs of one batch, labels of another."""

    def be_rank(world: World) -> None:
        net = Net()
        model = AutoVaruna(net, sgd(net), **REPLICAS, inputs="replicated")
        for step in range(3):
            batch = dict(BATCH)
            if differs and step and world.rank:
                batch["y"] = (batch["y"] + 1) % CLASSES
            model(**batch).backward()

    with caplog.at_level("WARNING"):
        run_ranks(2, be_rank)
    assert caplog.text.count("ranks [0, 1] are to pass the same samples, but y differ there") == differs
