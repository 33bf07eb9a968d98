"""Defines `Script`: a training script that runs as plain PyTorch and on ranks, and what is to come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

State: TypeAlias = dict[str, Tensor]


class Wrap(Protocol):
    """Is the line that a script adds; in plain PyTorch it returns the model as it is."""

    def __call__(self, model: nn.Module, optimizer: Optimizer | None = None, **settings: Any) -> Any: ...


Share: TypeAlias = Callable[[Tensor], Tensor]
"""Takes the samples of a global batch that this rank's data loader would give; in plain PyTorch all of them."""
Train: TypeAlias = Callable[[Wrap, Share], State | None]


@dataclass(frozen=True)
class Script:
    train: Train  # trains for some steps; returns what is to be compared beside the wrapped models, if anything
    change: str = ""  # what is written beside the line ``model = AutoVaruna(model, optimizer)``
    refusal: str = ""  # part of the error's text, a regular expression; empty: it has the numbers of plain PyTorch
    is_replicated: bool = False  # whether all ranks pass the whole batch

    @property
    def name(self) -> str:
        """The function's name, in words."""
        return self.train.__name__.replace("_", " ")

    @property
    def what(self) -> str:
        """The first sentence of the function's docstring."""
        return (self.train.__doc__ or "").strip().split("\n")[0].rstrip(".")


SCRIPTS: list[Script] = []
ONE_GRAPH = '`inputs="replicated", num_micro_batches=1, dynamic_batch=False`: all ranks pass the one graph'


def script(change: str = "", refusal: str = "", is_replicated: bool = False) -> Callable[[Train], Train]:
    """Puts a function into the list of scripts."""

    def add(train: Train) -> Train:
        SCRIPTS.append(Script(train, change, refusal, is_replicated))
        return train

    return add


def descend(optimizer: Optimizer, loss: Tensor) -> None:
    """Ends a step as every loop does."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def normal(seed: int, *shape: int) -> Tensor:
    """Returns normal random numbers of a shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(seed: int, high: int, *shape: int) -> Tensor:
    """Returns random integers below `high`."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))
