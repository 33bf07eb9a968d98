"""Draws models at random: a graph of operations on values of a few shapes, with whatever makes a graph hard to cut.

Values skip far ahead, parameters are shared or frozen, some never get a gradient, buffers are read and updated, numbers
are drawn, and integers and masks travel. A model depends on its seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.catalogue.case import Batch, Case, floats, generator, integers

WIDTHS = (4, 6, 8)
TOKENS = 3
WORDS = 11
NUM_PATHS = 3
Values = list[Tensor]
Act = Callable[[Values, nn.ModuleList], Values]
"""One operation, given the values so far and the model's modules (a copy of the model has others)."""


@dataclass
class Maker:
    """What a model under construction has: modules, and (tokens, width) of each value; 0: it has no such dimension."""

    chance: random.Random
    modules: nn.ModuleList = field(default_factory=nn.ModuleList)
    shapes: list[tuple[int, int]] = field(default_factory=lambda: [(0, WIDTHS[0])])

    def pick(self) -> int:
        """Returns the place of a value that is neither narrow nor wide, as a rule of one of the last."""
        places = [place for place, (_, width) in enumerate(self.shapes) if 2 <= width <= 24]
        return self.chance.choice(places if self.chance.random() < 0.25 else places[-3:])

    def keep(self, module: nn.Module) -> int:
        """Adds a module to the model and returns its place."""
        self.modules.append(module)
        return len(self.modules) - 1


class Smoothed(nn.Module):
    """Subtracts a running mean, which it updates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return y


class Scaled(nn.Module):
    """Multiplies by one number that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Lifted(nn.Module):
    """Adds a dimension of tokens, and their positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(TOKENS, width))

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) + self.places


def add_linear(make: Maker, place: int) -> Act:
    """A new layer, an earlier one again, or a frozen one."""
    tokens, width = make.shapes[place]
    known = [k for k, m in enumerate(make.modules) if isinstance(m, nn.Linear) and m.in_features == width]
    if known and make.chance.random() < 0.3:
        index = make.chance.choice(known)
    else:
        layer = nn.Linear(width, make.chance.choice(WIDTHS), bias=make.chance.random() < 0.7)
        index = make.keep(layer.requires_grad_(make.chance.random() < 0.9))
    make.shapes.append((tokens, make.modules[index].out_features))
    return lambda values, modules: [modules[index](values[place])]


def add_simple(make: Maker, place: int) -> Act:
    """One value of the same shape."""
    tokens, width = make.shapes[place]
    kinds: list[Callable[[Tensor], Tensor]] = [torch.tanh, F.gelu, torch.relu, torch.detach]
    kinds += [partial(torch.softmax, dim=-1), lambda x: 0.3 * torch.cumsum(x, dim=-1)]
    kinds += [nn.LayerNorm(width), Scaled(), nn.Dropout(0.3)] + [Smoothed(width)] * (tokens == 0)
    act = make.chance.choice(kinds)
    make.shapes.append((tokens, width))
    if not isinstance(act, nn.Module):
        return lambda values, modules: [act(values[place])]
    index = make.keep(act)
    return lambda values, modules: [modules[index](values[place])]


def add_two(make: Maker, place: int) -> Act:
    """Joins two values that have the same shape, however far apart."""
    shape = make.shapes[place]
    other = make.chance.choice([k for k, each in enumerate(make.shapes) if each == shape])
    kind = make.chance.choice(["add", "multiply", "cat", "where"])
    make.shapes.append((shape[0], 2 * shape[1]) if kind == "cat" else shape)

    def act(values: Values, modules: nn.ModuleList) -> Values:
        first, second = values[place], values[other]
        if kind == "add":
            return [first + second]
        if kind == "multiply":
            return [torch.tanh(first) * second]
        return [torch.cat([first, second], -1) if kind == "cat" else torch.where(first > 0, first, 0.5 * second)]

    return act


def add_split(make: Maker, place: int) -> Act:
    """Two halves of a value: views of one memory."""
    tokens, width = make.shapes[place]
    half = width // 2
    make.shapes += [(tokens, half), (tokens, width - half)]
    return lambda values, modules: list(torch.split(values[place], [half, width - half], dim=-1))


def add_tokens(make: Maker, place: int) -> Act:
    """From a value without tokens to one with them, or back."""
    tokens, width = make.shapes[place]
    if tokens == 0:
        index = make.keep(Lifted(width))
        make.shapes.append((TOKENS, width))
        return lambda values, modules: [modules[index](values[place])]
    make.shapes.append((0, width))
    if make.chance.random() < 0.5:
        return lambda values, modules: [values[place].mean(1)]
    return lambda values, modules: [F.scaled_dot_product_attention(values[place], values[place], values[place])[:, 0]]


ACTS = (add_linear, add_linear, add_simple, add_simple, add_two, add_two, add_split, add_tokens)


class Drawn(nn.Module):
    """A model of `num_acts` operations, whose loss is the mean of the squares of some values, others on each path.

    The inputs are ``x`` (batch, WIDTHS[0]), integers ``words`` (batch,), a mask ``keep`` (batch,), and ``path``.
    """

    def __init__(self, chance: random.Random, num_acts: int) -> None:
        super().__init__()
        make = Maker(chance)
        self.embedding = nn.Embedding(WORDS, WIDTHS[0])
        make.shapes.append((0, WIDTHS[0]))
        self.acts: list[Act] = [add_linear(make, 0)]
        while len(self.acts) < num_acts:
            place = make.pick()
            self.acts.append(chance.choice(ACTS)(make, place))
        self.modules_used = make.modules
        self.ends = [sorted(chance.sample(range(1, len(make.shapes)), 2)) for _ in range(NUM_PATHS)]
        self.ends[0] += range(max(2, len(make.shapes) - 4), len(make.shapes))

    def forward(self, x: Tensor, words: Tensor, keep: Tensor, path: int = 0) -> Tensor:
        values = [x, self.embedding(words) * keep.unsqueeze(1)]
        for act in self.acts:
            values += act(values, self.modules_used)
        return torch.stack([values[place].square().mean() for place in [1, *self.ends[path]]]).sum()


def batch(size: int, seed: int) -> Batch:
    g = generator(seed)
    kept = integers(2, size, of=g).bool()
    return (floats(size, WIDTHS[0], of=g),), {"words": integers(WORDS, size, of=g), "keep": kept}


def draw_case(seed: int, num_acts: int) -> Case:
    model = Drawn(random.Random(seed), num_acts)
    kinds = {type(module) for module in model.modules()}
    return Case(
        f"drawn_{seed}_{num_acts}",
        lambda: Drawn(random.Random(seed), num_acts),
        batch,
        has_dropout=nn.Dropout in kinds,
        has_batch_norm=Smoothed in kinds,
    )
