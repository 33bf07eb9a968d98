"""A forward that calls torch.autograd.grad is traced with the operations of that backward, and split like others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

from autovaruna import AutoVaruna
from autovaruna.errors import TraceError
from autovaruna.graph.comparisons import comparing
from tests.catalogue import Batch, Case
from tests.parallel.training import QUIET, pipeline, train
from tests.reference import compare, plain_steps

WIDTH = 6


class Field(nn.Module):
    """Has an energy, of whose gradients `loss` makes something."""

    def __init__(self, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH)
        self.second, self.last = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.loss = loss

    def energy(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.norm(torch.tanh(self.first(x))))
        return self.last(torch.sigmoid(self.second(hidden)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, x, y)


def forces(model: Field, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    energy = model.energy(x)
    (slope,) = grad(energy.sum(), x, create_graph=True)
    return energy.square().mean() + F.mse_loss(-slope, y)


def second_order(model: Field, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    value = model.energy(x)
    (slope,) = torch.autograd.grad(value, x, torch.ones_like(value), create_graph=True)
    (curve,) = grad(slope[:, 0].sum(), x, create_graph=True)
    return (value + slope.norm(2, dim=1, keepdim=True) - curve).square().mean() + y.square().mean()


def detached(model: Field, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    energy = model.energy(x)
    (slope,) = grad(energy.sum(), x, retain_graph=True)
    assert not slope.requires_grad
    return (energy * slope).mean() + F.mse_loss(-slope, y)


def averaged(model: Field, x: Tensor, y: Tensor) -> Tensor:
    """Divides by the size of the batch before it goes backward, as the loss does after."""
    x = x.requires_grad_()
    (slope,) = grad(model.energy(x).mean() + F.binary_cross_entropy_with_logits(x, y.sigmoid()), x, create_graph=True)
    return F.mse_loss(-slope, y)


def columns(model: Field, x: Tensor, y: Tensor) -> Tensor:
    """Goes backward from values that it lets go of."""
    x = x.requires_grad_()
    rows = [grad(model.first(x).tanh()[:, place].sum(), x, create_graph=True)[0] for place in range(2)]
    labels = y.argmax(1)
    (slope,) = grad(F.cross_entropy(model.second(model.first(x)), labels, reduction="sum"), x)
    return torch.stack(rows).square().mean() + model.energy(x + slope.sign()).mean()


def vectors(size: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return (), {name: torch.randn(size, WIDTH, generator=generator) for name in "xy"}


class Forces(nn.Module):
    """Returns an energy and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.field = Field(forces)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_() if x.is_leaf else x
        energy = self.field.energy(x)
        return energy, grad(energy.sum(), x, create_graph=self.training)[0]


class Outer(nn.Module):
    """Goes on from gradients that a submodule takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), Forces(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        energy, slope = self.inner(self.first(x))
        return F.mse_loss(self.last(slope), y) + energy.mean()


@pytest.mark.parametrize("loss", [forces, second_order, detached, averaged, columns])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_gradients_in_forward_are_split(loss: Callable[..., Tensor], num_stages: int) -> None:
    case = Case(loss.__name__, lambda: Field(loss), vectors)
    batches = [case.batch(7, step) for step in range(2)]
    compare(train(case, pipeline(num_stages), batches), plain_steps(case, batches))


def test_gradients_in_a_submodule_are_split() -> None:
    case = Case("outer", Outer, vectors)
    batches = [case.batch(7, step) for step in range(2)]
    compare(train(case, pipeline(2), batches), plain_steps(case, batches))


def test_outputs_may_be_gradients() -> None:
    case = Case(
        "forces",
        Forces,
        lambda size, step: ((vectors(size, step)[1]["x"],), {}),
        lambda output, batch: output[0].square().mean() + output[1].cos().mean(),
    )
    batches = [case.batch(7, step) for step in range(2)]
    compare(train(case, pipeline(2), batches), plain_steps(case, batches))


def test_a_trace_with_gradients_is_compared_with_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own run has a graph to go back through."""
    seen: list[int] = []
    known = comparing.distance
    monkeypatch.setattr(comparing, "distance", lambda one, other: seen.append(1) or known(one, other))
    AutoVaruna(Field(forces), num_micro_batches=2, **QUIET)(**vectors(4, 0)[1])
    assert seen


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, lambda x, y: F.cross_entropy(x, y.argmax(1))])
def test_gradients_of_means_for_each_sample_are_refused(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """They are divided by the size of the micro-batch, out of sight."""

    def adversarial(model: Field, x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_()
        return model.energy(x + grad(loss(model.second(model.first(x)), y), x)[0]).mean()

    with pytest.raises(TraceError, match=r"gradient of a mean over the samples, for each of them \(use a sum\)"):
        AutoVaruna(Field(adversarial), num_micro_batches=2, **QUIET)(**vectors(4, 0)[1])


def test_backward_in_forward_is_refused() -> None:
    def backward(model: Field, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        model.energy(x).sum().backward()
        return F.mse_loss(x.grad, y)  # type: ignore[arg-type]

    with pytest.raises(TraceError, match=r"goes backward itself \(backward\(\)\) at .*test_inner_gradients.*submodule"):
        AutoVaruna(Field(backward), num_micro_batches=2, **QUIET)(**vectors(4, 0)[1])
