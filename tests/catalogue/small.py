"""Lists small models of one idea each: layers, random nodes, buffers, parameters of every kind."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.catalogue.case import Batch, Case, floats, generator, integers

WIDTH = 12
CLASSES = 5
TOKENS = 8
WORDS = 23


def labelled(size: int, seed: int) -> Batch:
    """Returns ``x`` of shape (size, WIDTH) and ``y`` of shape (size,)."""
    g = generator(seed)
    return (), {"x": floats(size, WIDTH, of=g), "y": integers(CLASSES, size, of=g)}


def positional(size: int, seed: int) -> Batch:
    return (floats(size, WIDTH, of=generator(seed)),), {}


def words(size: int, seed: int) -> Batch:
    """Returns integer ``x`` of shape (size, TOKENS) and ``y`` of shape (size,)."""
    g = generator(seed)
    return (), {"x": integers(WORDS, size, TOKENS, of=g), "y": integers(CLASSES, size, of=g)}


def pictures(size: int, seed: int) -> Batch:
    """Returns ``x`` of shape (size, 3, 8, 8) and ``y`` of shape (size,)."""
    g = generator(seed)
    return (), {"x": floats(size, 3, 8, 8, of=g), "y": integers(CLASSES, size, of=g)}


def hidden(*middle: nn.Module) -> nn.Sequential:
    """Returns ``linear, *middle, linear`` from WIDTH features to CLASSES."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, CLASSES))


class Classifier(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), y)


class Written(nn.Module):
    """Has parts, of which tensors are buffers, and the forward that a test writes for it: ``forward(model, ...)``."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.forward = MethodType(forward, self)


def two_layers(forward: Callable[..., Any], **parts: Any) -> Any:
    """Returns a model with a first layer of WIDTH features, a last one of CLASSES, other parts, and a forward."""
    return Written(forward, **{"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, CLASSES), **parts})


def function_of(backward: Callable[[Tensor], Any], forward: Callable[[Tensor], Tensor] = torch.clone) -> Any:
    """Returns an autograd function of one tensor that keeps nothing."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return backward(gradients[0])

    return Own


def embed(self: Any, x: Tensor) -> Tensor:
    """Starts with integers: no gradient goes to the input."""
    return self.head(self.words(x).mean(dim=1))


class Residual(nn.Module):
    """Adds to a value that an in-place relu then overwrites, as ResNet does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        out += x
        return self.relu(out)


def conv_net(*norms: nn.Module) -> nn.Module:
    """Returns a small picture classifier with in-place relu, max-pool and residuals."""
    stem = (nn.Conv2d(3, 6, 3, padding=1), *norms, nn.ReLU(inplace=True), nn.MaxPool2d(2))
    body = (Residual(6), nn.MaxPool2d(2), Residual(6), nn.Flatten(), nn.Linear(24, CLASSES))
    return Classifier(nn.Sequential(*stem, *body))


class Constant(nn.Module):
    """Uses tensors that are neither parameters nor buffers: one an attribute, one made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = torch.linspace(0.5, 1.5, WIDTH)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Constant:
        self.scale = fn(self.scale)
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.arange(WIDTH, dtype=x.dtype, device=x.device) / WIDTH
        return self.last(torch.tanh(self.first(x * self.scale) + shift) * self.scale)


def throw_away(self: Any, x: Tensor) -> Tensor:
    """Holds a parameter that no output depends on, and one whose output is thrown away."""
    self.thrown(x)
    return self.body(x)


def frozen() -> nn.Module:
    """Returns a classifier whose first and third linear layers do not learn."""
    body = hidden(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    for index in (0, 4):
        body[index].requires_grad_(False)
    return Classifier(body)


def recur(self: Any, x: Tensor) -> Tensor:
    states, _ = self.lstm(self.words(x))
    return self.head(states[:, -1])


def call_twice(self: Any, x: Tensor) -> Tensor:
    """Calls one module two times, far apart: its parameters are tied with themselves."""
    out = torch.tanh(self.between(torch.tanh(self.first(x))))
    return self.last(torch.tanh(self.first(out)))


def move_average(self: Any, x: Tensor) -> Tensor:
    """Assigns and updates buffers in forward, in train mode only."""
    out = torch.tanh(self.first(x))
    if self.training:
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(dim=0)
        self.calls += 1
    return self.last(out - self.mean)


def teach(self: Any, x: Tensor) -> Tensor:
    """Computes a target under ``no_grad`` with its own parameters, and detaches a value."""
    with torch.no_grad():
        target = torch.softmax(self.teacher(x), dim=-1)
    out = torch.tanh(self.first(x))
    return F.mse_loss(self.last(out) * out.detach().norm(dim=-1, keepdim=True), target)


def classify(forward: Callable[..., Tensor], **parts: Any) -> nn.Module:
    """Returns a classifier whose body has some parts and a forward."""
    return Classifier(Written(forward, **parts))


def embedding() -> nn.Module:
    return classify(embed, words=nn.Embedding(WORDS, WIDTH, padding_idx=0), head=hidden(nn.GELU()))


def unused() -> nn.Module:
    never, thrown = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)
    return classify(throw_away, never=never, thrown=thrown, body=hidden(nn.Tanh()))


def recurrent() -> nn.Module:
    lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.2)
    return classify(recur, words=nn.Embedding(WORDS, WIDTH), lstm=lstm, head=nn.Linear(WIDTH, CLASSES))


def moving_average() -> nn.Module:
    return Classifier(two_layers(move_average, mean=torch.zeros(WIDTH), calls=torch.zeros((), dtype=torch.int64)))


def squared_mean(output: Tensor, batch: Batch) -> Tensor:
    """Returns the mean square of an output: a loss made outside of the model."""
    return output.square().mean()


class DropPath(nn.Dropout):
    """Drops whole samples, by numbers that are drawn on the CPU, wherever the model is."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[0], 1) >= self.p).to(x.device) if self.training else x


def dropouts() -> nn.Module:
    first = nn.Dropout(0.3), nn.Tanh(), nn.AlphaDropout(0.2), DropPath(0.3)
    return Classifier(hidden(*first, nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)))


def batch_norms() -> nn.Module:
    """Returns a classifier with batch normalisation, one layer of it without learned scale."""
    norms = nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False)
    return Classifier(hidden(*norms))


def chain() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return Classifier(nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)))


SMALL = (
    Case("chain", chain, labelled),
    Case("embedding", embedding, words, max_stages=3),
    Case("dropout", dropouts, labelled, has_dropout=True),
    Case("batch_norm", batch_norms, labelled, has_batch_norm=True),
    Case("conv_net", conv_net, pictures),
    Case("conv_net_batch_norm", lambda: conv_net(nn.BatchNorm2d(6)), pictures, has_batch_norm=True),
    Case("constant", lambda: Classifier(Constant()), labelled, max_stages=2),
    Case("unused_parameter", unused, labelled, max_stages=2),
    Case("frozen", frozen, labelled),
    Case("lstm", recurrent, words, has_dropout=True, max_stages=2),
    Case("module_twice", lambda: Classifier(two_layers(call_twice, between=nn.Linear(WIDTH, WIDTH))), labelled),
    Case("moving_average", moving_average, labelled, has_batch_norm=True, max_stages=2),
    Case("no_grad", lambda: two_layers(teach, teacher=nn.Linear(WIDTH, CLASSES)), positional, max_stages=2),
)
