"""Lists models with autograd functions whose backward is their own: a trace must keep them whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.catalogue.case import Case
from tests.catalogue.small import WIDTH, Classifier, hidden, labelled


class StraightThrough(torch.autograd.Function):
    """Rounds to a sign in forward and passes the gradient on, so many times, in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: float) -> Tensor:
        ctx.times = times
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.times * gradients[0], None


class Reversed(torch.autograd.Function):
    """Returns a view of its argument and turns the gradient round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -0.5 * gradients[0]


class Parts(torch.autograd.Function):
    """Returns two tensors of three, keeps what it needs the new way, and clips one gradient."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, options: tuple[str, int]) -> Any:
        return x * scale, options[0], (x.mean(-1, keepdim=True),)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, first: Tensor, _: None, rest: Any) -> Any:
        x, scale = ctx.saved_tensors
        return (first * scale).clamp(-1e-3, 1e-3), (first * x).sum(0), None


class Straight(nn.Module):
    """Uses one function twice, with other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.body = hidden(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = StraightThrough.apply(x * self.scale, 3.0) + x  # type: ignore[no-untyped-call]
        out: Tensor = self.body(x)
        return out + StraightThrough.apply(out, 2.0)  # type: ignore[no-untyped-call]


class Mixed(nn.Module):
    """Uses a view, a function of several results, and a checkpointed module of the old kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.first, self.body = nn.Linear(WIDTH, WIDTH), hidden(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = Reversed.apply(self.first(x))  # type: ignore[no-untyped-call]
        found, word, (mean,) = Parts.apply(x, self.scale, ("a", 1))  # type: ignore[no-untyped-call]
        assert word == "a"
        out: Tensor = checkpoint(self.body, found + mean, use_reentrant=True)
        return out


FUNCTIONS = (
    Case("own_backwards", lambda: Classifier(Straight()), labelled, max_stages=3),
    Case("many_results", lambda: Classifier(Mixed()), labelled, max_stages=3),
)
