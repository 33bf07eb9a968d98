"""A step goes backward again if the backward before it has kept the graph, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.session.training import Setup, gradients_of, on_ranks, pipeline

BATCH = labelled(6, 0)[1]
SETUPS = {
    "two": pipeline(2),
    "whole": pipeline(2, num_micro_batches=1),
    "recompute": pipeline(2, recompute=True),
    "replicas": Setup(((0, 1),), num_micro_batches=4, settings={"inputs": "replicated"}),
}


class Model(nn.Module):
    """Returns its loss, or scores."""

    def __init__(self, has_loss: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.has_loss = has_loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.last(torch.tanh(self.first(x)))
        return F.cross_entropy(scores, y) if self.has_loss else scores


def of_loss(model: Any) -> None:
    loss = model(**BATCH)
    loss.backward(retain_graph=True)
    (3.0 * loss).backward(retain_graph=True)
    loss.backward()


def of_two_losses(model: Any) -> None:
    """The second of which uses half of the scores."""
    scores = model(**BATCH)
    F.cross_entropy(scores, BATCH["y"]).backward(retain_graph=True)
    scores[:, 0].square().mean().backward(retain_graph=True)
    scores[:, 1:].square().mean().backward()


def of_gradients(model: Any) -> None:
    """Takes the gradients of each loss, and joins them itself."""
    scores, parameters = model(**BATCH), list(model.parameters())
    losses = [F.cross_entropy(scores, BATCH["y"]), scores.square().mean()]
    both = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    for parameter, *found in zip(parameters, *both, strict=True):
        parameter.grad = found[0] + 2 * found[1]


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("act", [of_loss, of_two_losses, of_gradients])
def test_every_backward_gives_its_gradients(act: Callable[[Any], None], setup: str) -> None:
    plain = Model(act is of_loss)

    def run(model: Any, optimizer: Any, rank: int) -> dict[str, Tensor]:
        act(model)
        return gradients_of(model)

    found = on_ranks(SETUPS[setup], plain, run)
    act(plain)
    expected = gradients_of(plain)
    for gradients in found:
        torch.testing.assert_close(gradients, {name: expected[name] for name in gradients}, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("has_loss", [False, True])
def test_a_backward_that_keeps_nothing_is_the_last(has_loss: bool) -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        loss = model(**BATCH).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    on_ranks(pipeline(2), Model(has_loss), run)


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("has_loss", [False, True])
def test_no_backward_goes_through_weights_that_have_changed(has_loss: bool, is_recomputed: bool) -> None:
    """Plain PyTorch refuses it as well."""

    def loss_of(model: Any) -> Tensor:
        found = model(**BATCH)
        return found if has_loss else F.cross_entropy(found, BATCH["y"])

    def step_between(model: Any, optimizer: Any) -> None:
        first, second = loss_of(model), loss_of(model)
        second.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|after weights have changed"):
            first.backward()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|after weights have changed"):
            second.backward()

    plain = Model(has_loss)
    on_ranks(pipeline(1, recompute=is_recomputed), plain, lambda model, optimizer, rank: step_between(model, optimizer))
    step_between(plain, torch.optim.SGD(plain.parameters(), 0.1))


def test_weights_that_no_gradient_needs_may_change() -> None:
    """The first layer's, for its input needs no gradient, and biases."""

    def act(model: Any) -> None:
        loss = model(**BATCH)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "first" in name or "bias" in name:
                    parameter.mul_(2.0)
        loss.backward()

    def run(model: Any, optimizer: Any, rank: int) -> dict[str, Tensor]:
        act(model)
        return gradients_of(model)

    plain = Model(has_loss=True)
    found = on_ranks(pipeline(2), plain, run)
    act(plain)
    expected = gradients_of(plain)
    for gradients in found:
        torch.testing.assert_close(gradients, {name: expected[name] for name in gradients}, rtol=1e-5, atol=1e-7)
