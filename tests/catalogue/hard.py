"""Lists models that a trace can get silently wrong: the library is right on them, or refuses them and says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, Classifier, hidden, labelled


class Noise(torch.autograd.Function):
    """Adds noise in forward and doubles the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2.0 * gradients[0]


class Noisy(nn.Module):
    """Draws random numbers in a function that has a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = hidden(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Noise.apply(self.body(x))  # type: ignore[no-untyped-call]
        return out


class Branch(nn.Module):
    """Chooses its way by the numbers in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left = hidden(nn.Tanh())
        self.right = hidden(nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x) if x.sum() > 0 else self.right(x)
        return out


class Counter(nn.Module):
    """Changes its result by a Python number that forward counts up."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.body = hidden(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.body(x) / self.calls
        return out


class Contrastive(nn.Module):
    """Compares the samples of a batch with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, CLASSES)
        self.right = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.left(x) @ self.right(x).t(), torch.arange(x.shape[0]))


class Hooked(nn.Module):
    """Doubles a gradient by a tensor hook that forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        middle = torch.tanh(self.first(x))
        if middle.requires_grad:
            middle.register_hook(lambda gradient: 2.0 * gradient)  # type: ignore[no-untyped-call]
        out: Tensor = self.last(middle)
        return out


def hard(name: str, body: type[nn.Module], refusal: str, has_batch_norm: bool = False) -> Case:
    """Returns a case with a reason to refuse it."""
    build = body if body is Contrastive else lambda: Classifier(body())
    return Case(name, build, labelled, has_batch_norm=has_batch_norm, max_stages=2, refusal=refusal)


HARD = (
    replace(
        hard("noisy_function", Noisy, "a function that is kept whole draws random numbers"),
        has_dropout=True,
        is_always_random=True,
    ),
    hard("branch", Branch, "branches on the numbers in a tensor", has_batch_norm=True),
    hard("counter", Counter, "a Python number that forward changes is fixed in the trace", has_batch_norm=True),
    hard("contrastive", Contrastive, "the loss compares the samples of a batch", has_batch_norm=True),
    hard("tensor_hook", Hooked, "torch.export drops the hooks that forward sets"),
)
