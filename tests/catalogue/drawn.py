"""Draws models at random: a graph of operations on values of a few shapes, with whatever makes a graph hard to cut.

Values skip far ahead, parameters are shared or frozen, some never get a gradient, buffers are read and updated, numbers
are drawn, and integers and masks travel. A model depends on its seed alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.catalogue.case import Batch, Case, floats, generator, integers
from tests.catalogue.small import Written

WIDTHS = (4, 6, 8)
TOKENS = 3
WORDS = 11
NUM_PATHS = 3
Values = list[Tensor]
Act = Callable[[Values, nn.ModuleList], Values]
"""One operation, given the values so far and the model's modules (a copy of the model has others)."""
Dim = tuple[int, bool]
"""A length of a dimension, as numbers or, if that is set, as rows of each sample."""
Dims = tuple[Dim, ...]
Move = Callable[[Tensor], Tensor]


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


def smooth(self: Any, x: Tensor) -> Tensor:
    """Subtracts a running mean, which it updates."""
    y = x - self.mean
    self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return y


def lifted(width: int) -> nn.Module:
    """Returns what adds a dimension of tokens, and their positions."""
    return Written(lambda self, x: x.unsqueeze(1) + self.places, places=nn.Parameter(torch.randn(TOKENS, width)))


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
    kinds += [nn.LayerNorm(width), Written(lambda self, x: x * self.scale, scale=nn.Parameter(torch.tensor(1.2)))]
    kinds += [nn.Dropout(0.3)] + [Written(smooth, mean=torch.zeros(width))] * (tokens == 0)
    act = make.chance.choice(kinds)
    make.shapes.append((tokens, width))
    if not isinstance(act, nn.Module):
        return lambda values, modules: [act(values[place])]
    index = make.keep(act)
    return lambda values, modules: [modules[index](values[place])]


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "multiply": lambda first, second: torch.tanh(first) * second,
    "cat": lambda first, second: torch.cat([first, second], -1),
    "where": lambda first, second: torch.where(first > 0, first, 0.5 * second),
}


def add_two(make: Maker, place: int) -> Act:
    """Joins two values that have the same shape, however far apart."""
    shape = make.shapes[place]
    other = make.chance.choice([k for k, each in enumerate(make.shapes) if each == shape])
    kind = make.chance.choice(["add", "multiply", "cat", "where"])
    make.shapes.append((shape[0], 2 * shape[1]) if kind == "cat" else shape)
    join = JOINS[kind]
    return lambda values, modules: [join(values[place], values[other])]


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
        index = make.keep(lifted(width))
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


def move_rows(chance: random.Random, shape: Dims) -> tuple[Move, Dims]:
    """The same numbers in another order or shape."""
    last = len(shape) - 1
    at = chance.randrange(len(shape))
    length, has_samples = shape[at]
    kind = chance.choice(["permute", "merge", "merge", "split", "split", "flip", "roll", "copy"])
    if kind == "permute":
        order = chance.sample(range(len(shape)), len(shape))
        return lambda v: v.permute(order), tuple(shape[k] for k in order)
    if kind == "merge" and at < last and not (has_samples and shape[at + 1][1]):
        merged = length * shape[at + 1][0], has_samples or shape[at + 1][1]
        return lambda v: v.flatten(at, at + 1), (*shape[:at], merged, *shape[at + 2 :])
    if kind == "split" and length > 1:
        part = chance.choice([k for k in range(2, length + 1) if length % k == 0])
        rest = length // part, has_samples
        if chance.random() < 0.5:
            return lambda v: v.unflatten(at, (part, -1)), (*shape[:at], (part, False), rest, *shape[at + 1 :])
        shapes = (*shape[:at], rest, (part, False), *shape[at + 1 :])
        return lambda v: v.reshape(*v.shape[:at], -1, part, *v.shape[at + 1 :]), shapes
    if kind in ("flip", "roll") and (not has_samples or chance.random() < 0.1):
        return (lambda v: v.flip(at)) if kind == "flip" else (lambda v: v.roll(1, at)), shape
    if kind == "copy":
        return lambda v: v.new_zeros(v.shape).copy_(v), shape
    return torch.tanh, shape


def more_rows(chance: random.Random, shape: Dims) -> tuple[Move, Dims]:
    """More rows, which have been there already."""
    at, times = chance.randrange(len(shape)), chance.choice([2, 3])
    length, has_samples = shape[at]
    longer = (*shape[:at], (times * length, has_samples), *shape[at + 1 :])
    ones = [times if k == at else 1 for k in range(len(shape))]
    moves: list[Move] = [
        lambda v: v.repeat(ones),
        lambda v: v.tile(ones),
        lambda v: v.repeat_interleave(times, at),
        lambda v: torch.cat([v, *[v.tanh() + k for k in range(1, times)]], at),
    ]
    inserted = (*shape[:at], (times, False), *shape[at:])
    if chance.random() < 0.4:
        expanded: Move = lambda v: v.unsqueeze(at).expand(*v.shape[:at], times, *v.shape[at:])  # noqa: E731
        return chance.choice([expanded, lambda v: torch.stack([v + k for k in range(times)], at)]), inserted
    return chance.choice(moves), longer


def fewer_rows(chance: random.Random, shape: Dims) -> tuple[Move, Dims]:
    """Some of the rows, or what is reduced of them."""
    at = chance.choice([k for k, (length, _) in enumerate(shape) if length > 1] or [0])
    length, has_samples = shape[at]
    which = chance.randrange(length)
    one: Dims = (*shape[:at], (1, has_samples), *shape[at + 1 :])
    none = (*shape[:at], *shape[at + 1 :])
    if has_samples:
        by_number: list[Move] = [
            lambda v: v.index_select(at, torch.arange(v.shape[at] // length) * length + which),
            lambda v: v.index_select(at, torch.arange(v.shape[at] // length) + which * (v.shape[at] // length)),
            lambda v: v.chunk(length, at)[which],
            lambda v: v.narrow(at, which * (v.shape[at] // length), v.shape[at] // length),
            lambda v: v.movedim(at, 0)[which::length].movedim(0, at),
            lambda v: v.unfold(at, length, length).mean(-1),
        ]
        return chance.choice(by_number), one
    if len(shape) > 2 and chance.random() < 0.6:
        reduced: list[Move] = [lambda v: v.mean(at), lambda v: v.sum(at), lambda v: v.amax(at)]
        return chance.choice([*reduced, lambda v: v.select(at, which)]), none
    if length > 2 and chance.random() < 0.5:
        return lambda v: v.unfold(at, 2, 1), (*shape[:at], (length - 1, False), *shape[at + 1 :], (2, False))
    return lambda v: v.narrow(at, which, 1), one


class Placed(nn.Module):
    """Adds numbers of places: of those within a sample, or of all."""

    def __init__(self, shape: Dims, kind: str) -> None:
        super().__init__()
        self.at = next(k for k, (_, has_samples) in enumerate(shape) if has_samples)
        self.kind, self.shape = kind, shape
        self.places = nn.Parameter(torch.randn([length for length, _ in shape]))

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[self.at] // self.shape[self.at][0]
        if self.kind == "repeat":
            return x + self.places.repeat([size if k == self.at else 1 for k in range(x.dim())])
        if self.kind == "interleave":
            return x + self.places.repeat_interleave(size, self.at)
        numbers = torch.arange(x.shape[self.at]).view(-1, *[1] * (x.dim() - self.at - 1))
        return x * torch.where(numbers % self.shape[self.at][0] == 0, 0.5, 1.0)


def normalise(chance: random.Random, shape: Dims) -> tuple[Move | nn.Module, Dims]:
    """Goes over a dimension, seldom over that of the samples, or through a layer."""
    within = [k for k, (_, has_samples) in enumerate(shape) if not has_samples]
    at = chance.choice(within) if within and chance.random() < 0.9 else chance.randrange(len(shape))
    moves: list[Move] = [
        lambda v: v.softmax(at),
        lambda v: v - v.mean(at, keepdim=True),
        lambda v: v / (1 + v.square().sum(at, keepdim=True)),
        lambda v: 0.3 * v.cumsum(at),
    ]
    layers: list[nn.Module] = [Placed(shape, kind) for kind in ("repeat", "interleave", "count")]
    width, has_samples = shape[-1]
    if not has_samples:
        layers += [nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)]
    return chance.choice([chance.choice(moves), chance.choice(layers)]), shape


def two_rows(chance: random.Random, shape: Dims) -> tuple[Callable[[Tensor, Tensor], Tensor], Dims]:
    """Joins two values of one shape."""
    at = chance.randrange(len(shape))
    length, has_samples = shape[at]
    joins = [JOINS["add"], JOINS["multiply"], JOINS["where"], lambda v, w: v.masked_fill(w > 0.5, 0.1)]
    if len(shape) == 3 and not shape[-1][1] and not shape[-2][1]:
        joins.append(lambda v, w: v @ w.transpose(1, 2).softmax(-1) @ w)
    if chance.random() < 0.3:
        return lambda v, w: torch.cat([v, w], at), (*shape[:at], (2 * length, has_samples), *shape[at + 1 :])
    return chance.choice(joins), shape


def by_row(value: Tensor, at: int) -> Tensor:
    return value.movedim(at, 0).reshape(value.shape[at], -1)


def rows_of(shape: Dims) -> tuple[int, int, int]:
    """Returns the dimension of samples, how many rows each has there, and how many numbers a row has."""
    at = next((k for k, (_, has_samples) in enumerate(shape) if has_samples), -1)
    rows = shape[at][0] if at >= 0 else 0
    return at, rows, math.prod(length for length, _ in shape) // max(rows, 1)


def draw_loss(chance: random.Random, shape: Dims) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns a loss of two values of one shape, and of a number for each sample."""
    at, rows, _ = rows_of(shape)
    width, chance_of_root = shape[-1][0], chance.random()
    losses: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
        lambda v, w, words: (
            v.square() * (1 + torch.arange(v.shape[1 - at]).view(-1, *[1] * at)) if v.dim() == 2 else v
        ).mean(),
        lambda v, w, words: v.square().mean(),
        lambda v, w, words: v.square().mean() if chance_of_root > 0.2 else (1 + v.square().mean()).sqrt(),
        lambda v, w, words: v.mean(at).square().sum() if chance_of_root < 0.2 else v.mean(at).sum(),
        lambda v, w, words: F.mse_loss(v, w.tanh()),
        lambda v, w, words: (v * w).sum() / words.shape[0],
        lambda v, w, words: by_row(v, at).norm(dim=1).mean(),
        lambda v, w, words: (by_row(v, at) * words.repeat(rows).unsqueeze(1)).mean(),
    ]
    if len(shape) == 2 and at == 0:
        losses += [
            lambda v, w, words: F.cross_entropy(v, (words % width).repeat(rows)),
            lambda v, w, words: F.cross_entropy(v, (words % width).repeat_interleave(rows)),
            lambda v, w, words: F.cross_entropy(v, w.argmax(1)),
        ]
    return chance.choice(losses)


class Mixed(nn.Module):
    """A model of `num_acts` operations that repeat, move, cut, join and normalise rows of samples, or mix them.

    Inputs are those of `Drawn`, and so are losses: means, as a rule, of what is made of some values.
    """

    def __init__(self, chance: random.Random, num_acts: int) -> None:
        super().__init__()
        self.embedding, self.lift, self.layers = nn.Embedding(WORDS, WIDTHS[0]), lifted(WIDTHS[0]), nn.ModuleList()
        self.first = nn.Linear(WIDTHS[0], WIDTHS[0])
        width = WIDTHS[0], False
        shapes: list[Dims] = [((1, True), width), ((1, True), width), ((1, True), (TOKENS, False), width)]
        self.acts: list[Act] = []
        while len(self.acts) < num_acts:
            place = chance.choice(range(len(shapes))[-4:])
            alike = [k for k, each in enumerate(shapes) if each == shapes[place]]
            _, *counts = rows_of(shapes[place])
            meeting = [k for k, each in enumerate(shapes) if list(rows_of(each)[1:]) == counts]
            if counts[0] > 1 and len(meeting) > 1 and chance.random() < 0.4:
                act, shape = self._of_rows(chance, shapes, place, chance.choice(meeting))
            elif len(alike) > 1 and chance.random() < 0.6:
                act, shape = self._of_two(chance, shapes, chance.choice(alike), chance.choice(alike))
            else:
                act, shape = self._of_one(chance, shapes, place)
            if math.prod(length for length, _ in shape) <= 200:
                self.acts.append(act)
                shapes.append(shape)
        self.ends = [self._end(chance, shapes, place) for place in (len(shapes) - 1, chance.randrange(3, len(shapes)))]

    def _of_one(self, chance: random.Random, shapes: list[Dims], place: int) -> tuple[Act, Dims]:
        move, shape = chance.choice([move_rows, move_rows, more_rows, more_rows, fewer_rows, normalise])(
            chance, shapes[place]
        )
        if isinstance(move, nn.Module):
            self.layers.append(move)
            index = len(self.layers) - 1
            return lambda values, modules: [modules[index](values[place])], shape
        return lambda values, modules: [move(values[place])], shape

    def _of_two(self, chance: random.Random, shapes: list[Dims], one: int, other: int) -> tuple[Act, Dims]:
        join, shape = two_rows(chance, shapes[one])
        return lambda values, modules: [join(values[one], values[other])], shape

    def _of_rows(self, chance: random.Random, shapes: list[Dims], one: int, other: int) -> tuple[Act, Dims]:
        """Joins two values row by row."""
        (at, rows, width), (beside, *_) = rows_of(shapes[one]), rows_of(shapes[other])
        join, shape = two_rows(chance, ((rows, True), (width, False)))
        return lambda values, modules: [join(by_row(values[one], at), by_row(values[other], beside))], shape

    def _end(self, chance: random.Random, shapes: list[Dims], place: int) -> Callable[[Values, Tensor], Tensor]:
        if not any(has_samples for _, has_samples in shapes[place]):
            return lambda values, words: values[place].square().mean()
        other = chance.choice([k for k, each in enumerate(shapes) if each == shapes[place]])
        loss = draw_loss(chance, shapes[place])
        return lambda values, words: loss(values[place], values[other], words)

    def forward(self, x: Tensor, words: Tensor, keep: Tensor) -> Tensor:
        h = self.first(x)
        values = [h, self.embedding(words) * keep.unsqueeze(1), self.lift(h)]
        for act in self.acts:
            values += act(values, self.layers)
        return sum((end(values, words) for end in self.ends), values[0].square().mean())


def batch(size: int, seed: int) -> Batch:
    g = generator(seed)
    kept = integers(2, size, of=g).bool()
    return (floats(size, WIDTHS[0], of=g),), {"words": integers(WORDS, size, of=g), "keep": kept}


def draw_case(seed: int, num_acts: int) -> Case:
    def build() -> Drawn:
        return Drawn(random.Random(seed), num_acts)

    has_dropout = any(isinstance(module, nn.Dropout) for module in build().modules())
    name, has_buffers = f"drawn_{seed}_{num_acts}", any(True for _ in build().buffers())
    return Case(name, build, batch, has_dropout=has_dropout, has_batch_norm=has_buffers)


def draw_mixed(seed: int) -> Case:
    chance = random.Random(seed)
    num_acts, start = chance.randint(4, 14), chance.random()
    return Case(f"mixed_{seed}", lambda: Mixed(random.Random(start), num_acts), batch)
