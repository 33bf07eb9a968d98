"""Autograd functions that reach the weights of modules: they run these again in their backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna, TraceError
from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, Classifier, hidden, labelled
from tests.reference import compare, plain_steps
from tests.session.training import QUIET, Setup, pipeline, train

SIZE, STEPS = 6, 2


class Again(torch.autograd.Function):
    """Runs a module forward, and forward again in its backward, where the weights take their gradients themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        out: Tensor = module(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            out = ctx.module(x)
        torch.autograd.backward(out, gradients[0])
        return x.grad, None


class Asking(torch.autograd.Function):
    """Is given a function and the weights that it uses, and asks for their gradients in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.others = function, weights
        with torch.no_grad():
            out: Tensor = function(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        function, weights = ctx.others
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            found = torch.autograd.grad(function(x), (x, *weights), gradients[0])
        return found[0], None, *found[1:]


class Stopping(Again):
    """Leaves the weights without gradients, though they take part in its forward."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(ctx.module(x), x, gradients[0])[0], None


class Reaching(nn.Module):
    """Calls one of the functions between two layers."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function, self.inner = function, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        if self.function is Asking:
            return Asking.apply(x, lambda each: self.inner(each), *self.inner.parameters())  # type: ignore[no-any-return, no-untyped-call]
        return self.function.apply(x, self.inner)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("function", (Again, Asking, Stopping), ids=lambda each: each.__name__)
@pytest.mark.parametrize("setup", (pipeline(2), pipeline(2, recompute=True), Setup(((0, 1),), 4)), ids=("2", "re", "r"))
def test_gradients_are_those_of_plain_pytorch(function: type[torch.autograd.Function], setup: Setup) -> None:
    """They are collected with all others, and summed over replicas, whoever accumulates them."""
    name = f"reaching_{function.__name__}"
    case = Case(name, lambda: Classifier(hidden(Reaching(function))), labelled)
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    compare(train(case, setup, batches), plain_steps(case, batches))


def test_a_gradient_survives_zero_grad_between_call_and_backward() -> None:
    model = Classifier(hidden(Reaching(Again)))
    inputs = labelled(SIZE, 0)[1]
    model(**inputs).backward()
    expected = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()
    wrapped = AutoVaruna(model, num_micro_batches=2, **QUIET)
    loss = wrapped(**inputs)
    wrapped.zero_grad()
    loss.backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, expected[name], rtol=1e-5, atol=1e-7)


class Root(nn.Module):
    """Calls a function with weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(Again.apply(x, self.inner))  # type: ignore[no-untyped-call]
        return out


def test_in_the_models_own_forward_it_is_refused() -> None:
    with pytest.raises(TraceError, match=r"Again uses the weights of Linear.*call it in a submodule"):
        AutoVaruna(Root(), num_micro_batches=2, **QUIET)(torch.randn(SIZE, WIDTH))
