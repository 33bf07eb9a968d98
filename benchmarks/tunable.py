"""Defines a pipeline of stages whose arithmetic and whose messages can be chosen: what a benchmark sweeps over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F
from peers import COMM
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """What every stage does with a micro-batch.

    Attributes:
        num_rows: samples in it.
        width: numbers in a sample, within a stage.
        num_layers: layers of a stage.
        message_width: numbers of a sample that go from stage to stage.
    """

    num_rows: int
    width: int
    num_layers: int
    message_width: int


class Stage(nn.Module):
    """Widens or narrows what comes in, works on it, and brings what leaves to the size of a message."""

    def __init__(self, shape: Shape, is_last: bool) -> None:
        super().__init__()
        self.shape = shape
        self.is_last = is_last
        self.layers = nn.ModuleList(nn.Linear(shape.width, shape.width) for _ in range(shape.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        x = resize(x, self.shape.width)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if self.is_last else resize(x, self.shape.message_width)


def resize(x: Tensor, width: int) -> Tensor:
    """Returns (rows, width): `x` again and again, or sums of its columns, so that all of `x` is needed."""
    num_repeats = -(-width // x.shape[1])
    if num_repeats > 1:
        return x.repeat(1, num_repeats)[:, :width]
    num_parts = x.shape[1] // width
    if num_parts > 1:
        return x[:, : num_parts * width].unflatten(1, (num_parts, width)).sum(1)
    return x[:, :width].contiguous() if x.shape[1] > width else x


def squared(scores: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss of a micro-batch."""
    return F.mse_loss(scores, targets)


class Chain(nn.Module):
    """The stages one after another, and the loss."""

    def __init__(self, shape: Shape, num_stages: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(shape, i == num_stages - 1) for i in range(num_stages))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return squared(x, targets)


def cuts_of(num_stages: int) -> list[str]:
    """Returns the modules at which a new stage starts."""
    return [f"stages.{i}" for i in range(1, num_stages)]


def batch_of(shape: Shape, num_micro_batches: int) -> tuple[Tensor, Tensor]:
    """Draws a batch: what goes in and what should come out."""
    size = shape.num_rows * num_micro_batches, shape.width
    chance = torch.Generator().manual_seed(0)
    return torch.randn(size, generator=chance), torch.randn(size, generator=chance)


def shape_for(seconds: float, message_bytes: int) -> Shape:
    """Returns a shape whose layers take at most `seconds` forward and backward, where all ranks compute at once.

    Collective. What is found is measured anew: many layers leave the caches that a few stay in.
    """
    if seconds < 5e-4:
        num_rows, width = 16, 64
    elif seconds < 5e-3:
        num_rows, width = 64, 256
    else:
        num_rows, width = 256, 256
    shape = Shape(num_rows, width, 4, max(1, message_bytes // (4 * num_rows)))
    for _ in range(3):
        layers = Stage(replace(shape, message_width=width), is_last=True)
        own = seconds_of_stage(layers, torch.randn(num_rows, width), 20)
        slowest = max(COMM.allgather(own))
        shape = replace(shape, num_layers=max(1, int(shape.num_layers * seconds / slowest)))
    return shape


def seconds_of_stage(stage: nn.Module, x: Tensor, num_times: int) -> float:
    """Returns the median seconds of a forward and a backward."""
    x = x.detach().requires_grad_()
    out = stage(x)
    gradient = torch.ones_like(out)

    def work() -> None:
        stage(x).backward(gradient)

    COMM.Barrier()
    return median(clocked(work) for _ in range(num_times))


def clocked(work: Callable[[], object]) -> float:
    """Calls `work` and returns its seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
