"""Lists models whose graph, arguments or outputs are not a chain of single tensors, and some with own backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.catalogue.case import Batch, Case, floats, generator, integers
from tests.catalogue.small import CLASSES, TOKENS, WIDTH, WORDS, Classifier, hidden, labelled, positional, squared_mean


def linears(num: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num))


class Layered(nn.Module):
    """Holds square layers and a head; subclasses say how they are joined."""

    num_layers = 4

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(self.num_layers)
        self.head = nn.Linear(WIDTH, CLASSES)

    def layer(self, index: int, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[index](x))

    def through(self, x: Tensor, start: int = 0, end: int = 4) -> Tensor:
        """Returns what layers from `start` to `end` make, one after the other."""
        for index in range(start, end):
            x = self.layer(index, x)
        return x


class ForkJoin(Layered):
    """Splits into two branches of two layers and joins them by a product and a sum."""

    num_layers = 5

    def forward(self, x: Tensor) -> Tensor:
        root = self.layer(0, x)
        left, right = self.through(root, 1, 3), self.through(root, 3, 5)
        return self.head(left * right + left)


class ThreeUsers(Layered):
    """Makes one value that three later layers use, so that its gradient is a sum of four."""

    def forward(self, x: Tensor) -> Tensor:
        root = out = self.layer(0, x)
        for index in (1, 2, 3):
            out = self.layer(index, out) + 0.3 * index * root
        return self.head(out)


class NoElements(Layered):
    """Makes a value of no elements in the first layer, which the last one uses: a message of no bytes, either way."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(0, x)
        nothing = torch.exp(out[:, :0])
        return self.head(torch.cat([self.through(out, 1), nothing], 1))


class Skip(Layered):
    """Carries the first layer's output over two layers, by concatenation, and the input over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layer(0, x)
        return self.head(torch.tanh(self.join(torch.cat((first, self.through(first, 1)), dim=1))))


class SharedInput(Layered):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = x
        for index in range(self.num_layers):
            out = self.layer(index, out) * x + y.unsqueeze(1) / CLASSES
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


class Anchored(Layered):
    """Uses a layer's weight once more at its end, where no gradient goes back to it."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.through(x)
        with torch.no_grad():
            anchor = self.layer(0, self.layer(1, x))
        return self.head(out * anchor)


@dataclass
class Answer:
    """An output of a user's own class, registered as a pytree below."""

    scores: Tensor
    features: Tensor
    note: Any = None


pytree.register_dataclass(Answer)


class Outputs(Layered):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        features = self.through(x, 0, 2)
        scores = self.head(self.through(features, 2))
        containers = {
            "tuple": (scores, features),
            "dict": {"scores": scores, "nested": {"features": [features]}},
            "dataclass": Answer(scores, features),
            "none": (scores, None, {"nothing": None, "features": features}),
        }
        return containers[self.kind]


class TwoLosses(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        half = self.through(x, 0, 2)
        return F.cross_entropy(self.head(self.through(half, 2)), y), F.cross_entropy(self.early(half), y)


class LossAndScores(Layered):
    """Returns a dict of the loss and of what it was made from, as many libraries do."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.through(x))
        return {"loss": F.cross_entropy(scores, y), "scores": scores}


class Keyworded(Layered):
    """Takes numbers, words, None and flags beside tensors; they choose the graph."""

    def forward(
        self, x: Tensor, *, y: Tensor, mode: str = "plain", scale: float = 1.0, mask: Any = None, repeats: int = 1
    ) -> Tensor:
        out = x if mask is None else x * mask
        for _ in range(repeats):
            out = self.through(out)
        out = self.head(out) * scale
        return F.cross_entropy(out if mode == "plain" else torch.sin(out), y)


class Nested(Layered):
    """Takes a dict of lists and tuples of tensors, and a tensor without a batch dimension."""

    def forward(self, batch: dict[str, Any], weights: Tensor) -> Tensor:
        left, right = batch["views"]
        out = self.layer(1, self.layer(0, left)) + self.layer(2, right) * weights
        scores = self.head(self.layer(3, out) + batch["more"]["offset"][0])
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
    return Case(f"outputs_{kind}", lambda: Outputs(kind), positional, all_outputs)


STRUCTURE = (
    Case("three_users", lambda: Classifier(ThreeUsers()), labelled),
    Case("skip", lambda: Classifier(Skip()), labelled),
    Case("tied", lambda: Tied(2), tokens, max_stages=3),
    Case("tied_three_ways", lambda: Tied(3), tokens, max_stages=3),
    Case("tied_without_gradient", lambda: Classifier(Anchored()), labelled),
    Case("shared_input", SharedInput, labelled),
    outputs("tuple"),
    Case("returned_scores", ForkJoin, positional, squared_mean),
    Case("two_losses", TwoLosses, labelled, lambda output, batch: output[0] + 0.5 * output[1]),
    Case("loss_and_scores", LossAndScores, labelled),
    Case("keywords", Keyworded, keyworded),
    Case("nested_inputs", Nested, nested),
    Case("no_elements", lambda: Classifier(NoElements()), labelled),
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


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.first, self.body = nn.Linear(WIDTH, WIDTH), hidden(nn.Tanh())


class Straight(Scaling):
    def forward(self, x: Tensor) -> Tensor:
        x = StraightThrough.apply(self.first(x) * self.scale, 3.0) + x
        out: Tensor = self.body(x)
        return out + StraightThrough.apply(out, 2.0)


class Mixed(Scaling):
    """Uses a view, a function of several results, and a checkpointed module of the old kind."""

    def forward(self, x: Tensor) -> Tensor:
        x = Reversed.apply(self.first(x))
        found, word, (mean,) = Parts.apply(x, self.scale, ("a", 1))
        assert word == "a"
        return checkpoint(self.body, found + mean, use_reentrant=True)


FUNCTIONS = (
    Case("own_backwards", lambda: Classifier(Straight()), labelled, max_stages=3),
    Case("many_results", lambda: Classifier(Mixed()), labelled, max_stages=3),
)
