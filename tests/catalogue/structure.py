"""Lists models whose graph, arguments or outputs are not a chain of single tensors, and some with own backwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.catalogue.case import Batch, Case, floats, generator, integers
from tests.catalogue.small import (
    CLASSES,
    TOKENS,
    WIDTH,
    WORDS,
    Classifier,
    Written,
    classify,
    function_of,
    hidden,
    labelled,
    positional,
    squared_mean,
)


def linears(num: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num))


def layered(forward: Callable[..., Any], num_layers: int = 4, **parts: nn.Module) -> nn.Module:
    """Returns a model of square layers and a head, which its forward joins."""
    return Written(forward, layers=linears(num_layers), head=nn.Linear(WIDTH, CLASSES), **parts)


def apply(model: Any, index: int, x: Tensor) -> Tensor:
    return torch.tanh(model.layers[index](x))


def through(model: Any, x: Tensor, start: int = 0, end: int = 4) -> Tensor:
    """Returns what layers from `start` to `end` make, one after the other."""
    for index in range(start, end):
        x = apply(model, index, x)
    return x


def fork_join(self: Any, x: Tensor) -> Tensor:
    """Splits into two branches of two layers and joins them by a product and a sum."""
    root = apply(self, 0, x)
    left, right = through(self, root, 1, 3), through(self, root, 3, 5)
    return self.head(left * right + left)


def three_users(self: Any, x: Tensor) -> Tensor:
    """Makes one value that three later layers use, so that its gradient is a sum of four."""
    root = out = apply(self, 0, x)
    for index in (1, 2, 3):
        out = apply(self, index, out) + 0.3 * index * root
    return self.head(out)


def no_elements(self: Any, x: Tensor) -> Tensor:
    """Makes a value of no elements in the first layer, which the last one uses: a message of no bytes, either way."""
    out = apply(self, 0, x)
    nothing = torch.exp(out[:, :0])
    return self.head(torch.cat([through(self, out, 1), nothing], 1))


def skip(self: Any, x: Tensor) -> Tensor:
    """Carries the first layer's output over two layers, by concatenation, and the input over all of them."""
    first = apply(self, 0, x)
    return self.head(torch.tanh(self.join(torch.cat((first, through(self, first, 1)), dim=1))))


def shared_input(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = x
    for index in range(4):
        out = apply(self, index, out) * x + y.unsqueeze(1) / CLASSES
    return F.cross_entropy(self.head(out), y)


class Tied(nn.Module):
    """Uses one weight as embedding and as output, and with `num_uses` of three also in the middle."""

    def __init__(self, num_uses: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = linears(2)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.middle = nn.Linear(WIDTH, WORDS, bias=False) if num_uses == 3 else None
        if self.middle is not None:
            self.middle.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out = torch.tanh(self.layers[0](self.words(tokens)))
        if self.middle is not None:
            out = out + torch.softmax(self.middle(out), dim=-1) @ self.words.weight
        out = self.head(torch.tanh(self.layers[1](out)))
        return F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def anchored(self: Any, x: Tensor) -> Tensor:
    """Uses a layer's weight once more at its end, where no gradient goes back to it."""
    out = through(self, x)
    with torch.no_grad():
        anchor = apply(self, 0, apply(self, 1, x))
    return self.head(out * anchor)


@dataclass
class Answer:
    """An output of a user's own class, registered as a pytree below."""

    scores: Tensor
    features: Tensor
    note: Any = None


pytree.register_dataclass(Answer)


def contain(self: Any, x: Tensor, kind: str) -> Any:
    """Returns outputs in a container."""
    features = through(self, x, 0, 2)
    scores = self.head(through(self, features, 2))
    containers = {
        "tuple": (scores, features),
        "dict": {"scores": scores, "nested": {"features": [features]}},
        "dataclass": Answer(scores, features),
        "none": (scores, None, {"nothing": None, "features": features}),
    }
    return containers[kind]


def two_losses(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    half = through(self, x, 0, 2)
    return F.cross_entropy(self.head(through(self, half, 2)), y), F.cross_entropy(self.early(half), y)


def loss_and_scores(self: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Returns a dict of the loss and of what it was made from, as many libraries do."""
    scores = self.head(through(self, x))
    return {"loss": F.cross_entropy(scores, y), "scores": scores}


def by_keywords(
    self: Any, x: Tensor, *, y: Tensor, mode: str = "plain", scale: float = 1.0, mask: Any = None, repeats: int = 1
) -> Tensor:
    """Takes numbers, words, None and flags beside tensors; they choose the graph."""
    out = x if mask is None else x * mask
    for _ in range(repeats):
        out = through(self, out)
    out = self.head(out) * scale
    return F.cross_entropy(out if mode == "plain" else torch.sin(out), y)


def unnest(self: Any, batch: dict[str, Any], weights: Tensor) -> Tensor:
    """Takes a dict of lists and tuples of tensors, and a tensor without a batch dimension."""
    left, right = batch["views"]
    out = apply(self, 1, apply(self, 0, left)) + apply(self, 2, right) * weights
    scores = self.head(apply(self, 3, out) + batch["more"]["offset"][0])
    return F.cross_entropy(scores, batch["target"])


def tokens(size: int, seed: int) -> Batch:
    return (), {"tokens": integers(WORDS, size, TOKENS, of=generator(seed))}


def keyworded(size: int, seed: int) -> Batch:
    """Returns one positional tensor, keyword tensors, and keywords that are no tensors."""
    g = generator(seed)
    words = {"mode": "sine", "scale": 2.0, "mask": None, "repeats": 2}
    return (floats(size, WIDTH, of=g),), {"y": integers(CLASSES, size, of=g), **words}


def nested(size: int, seed: int) -> Batch:
    """Returns a nested batch and ``weights`` of shape (WIDTH,), the same for any seed."""
    g = generator(seed)
    views, more = [floats(size, WIDTH, of=g) for _ in range(2)], {"offset": (floats(size, 1, of=g),)}
    batch = {"views": views, "more": more, "target": integers(CLASSES, size, of=g)}
    return (batch,), {"weights": torch.linspace(0.1, 1.0, WIDTH)}


def all_outputs(output: Any, batch: Batch) -> Tensor:
    """Returns a loss that depends on every tensor of a nested output."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.square().mean() * (index + 1) for index, leaf in enumerate(leaves)]).sum()


def outputs(kind: str) -> Case:
    return Case(f"outputs_{kind}", lambda: layered(lambda self, x: contain(self, x, kind)), positional, all_outputs)


STRUCTURE = (
    Case("three_users", lambda: Classifier(layered(three_users)), labelled),
    Case("skip", lambda: Classifier(layered(skip, join=nn.Linear(2 * WIDTH, WIDTH))), labelled),
    Case("tied", lambda: Tied(2), tokens, max_stages=3),
    Case("tied_three_ways", lambda: Tied(3), tokens, max_stages=3),
    Case("tied_without_gradient", lambda: Classifier(layered(anchored)), labelled),
    Case("shared_input", lambda: layered(shared_input), labelled),
    outputs("tuple"),
    Case("returned_scores", lambda: layered(fork_join, num_layers=5), positional, squared_mean),
    Case(
        *("two_losses", lambda: layered(two_losses, early=nn.Linear(WIDTH, CLASSES)), labelled),
        lambda output, batch: output[0] + 0.5 * output[1],
    ),
    Case("loss_and_scores", lambda: layered(loss_and_scores), labelled),
    Case("keywords", lambda: layered(by_keywords), keyworded),
    Case("nested_inputs", lambda: layered(unnest), nested),
    Case("no_elements", lambda: Classifier(layered(no_elements)), labelled),
)
CONTAINERS = (outputs("dict"), outputs("dataclass"), outputs("none"))
"""The model of ``outputs_tuple`` with its outputs in other containers."""


class StraightThrough(torch.autograd.Function):
    """Rounds to a sign in forward and passes the gradient on, so many times, in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: float) -> Tensor:
        ctx.times = times
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.times * gradients[0], None


REVERSED = function_of(lambda gradient: -0.5 * gradient, lambda x: x.view_as(x))


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


def straight(self: Any, x: Tensor) -> Tensor:
    x = StraightThrough.apply(self.first(x) * self.scale, 3.0) + x
    out: Tensor = self.body(x)
    return out + StraightThrough.apply(out, 2.0)


def mixed(self: Any, x: Tensor) -> Tensor:
    """Uses a view, a function of several results, and a checkpointed module of the old kind."""
    x = REVERSED.apply(self.first(x))
    found, word, (mean,) = Parts.apply(x, self.scale, ("a", 1))
    assert word == "a"
    return checkpoint(self.body, found + mean, use_reentrant=True)


def scaling(forward: Callable[..., Tensor]) -> nn.Module:
    scale = nn.Parameter(torch.randn(WIDTH))
    return classify(forward, scale=scale, first=nn.Linear(WIDTH, WIDTH), body=hidden(nn.Tanh()))


FUNCTIONS = (
    Case("own_backwards", lambda: scaling(straight), labelled, max_stages=3),
    Case("many_results", lambda: scaling(mixed), labelled, max_stages=3),
)
