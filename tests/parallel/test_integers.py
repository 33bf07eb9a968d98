"""Integers that a model makes of sizes: ``int`` wants a number that a trace does not have."""

from __future__ import annotations

import builtins
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, TraceError
from autovaruna.graph.exporting.integers import integers_of_sizes
from tests.catalogue.case import Batch, Case, floats, generator, integers
from tests.parallel.training import QUIET, pipeline, train
from tests.reference import bit_equal, compare, plain_steps

WIDTH, LENGTH, CLASSES, SIZE = 8, 7, 3, 6


def of_shape(x: Tensor, lengths: Tensor) -> Tensor:
    """Makes a tensor for as many samples as there are."""
    return x + torch.arange(int(x.shape[0])).cumsum(0).mul(0)[:, None, None]


def of_all_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    """Goes through a shape number by number, in a frame of its own."""
    rows, *others = tuple(int(length) for length in x.shape)
    return x.reshape(rows * others[0], int(others[1])).view(rows, *others)


def of_greatest(x: Tensor, lengths: Tensor) -> Tensor:
    """Masks what is past the end of a sample, up to that of the longest, and goes no further."""
    longest = int(lengths.max())
    return x[:, :longest] * (torch.arange(longest) < lengths[:, None])[..., None] / longest


def of_item(x: Tensor, lengths: Tensor) -> Tensor:
    """Takes the item out by itself, and asks what kind of number came of it."""
    half = int(int(lengths.max().item()) / 2)
    assert isinstance(half, int | torch.SymInt) and isinstance(3, int) and int == builtins.int and int("3") == 3  # noqa: E721
    return x[:, :LENGTH] / half


class Counting(nn.Module):
    """Makes integers of sizes between two layers."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), function

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        out = self.function(torch.tanh(self.first(x)), lengths)
        return F.cross_entropy(self.last(out.sum(1)), y)


def batch(size: int, seed: int) -> Batch:
    """Returns samples of several lengths, of which the first one is the longest."""
    g = generator(seed)
    lengths = torch.cat([torch.tensor([LENGTH - seed]), 1 + integers(3, size - 1, of=g)])
    return (floats(size, LENGTH, WIDTH, of=g), lengths, integers(CLASSES, size, of=g)), {}


@pytest.mark.parametrize("function", (of_shape, of_all_lengths, of_greatest, of_item), ids=lambda each: each.__name__)
def test_right_numbers(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The model trains as in plain PyTorch, though its longest sample is in one micro-batch alone."""
    case = Case(f"counting_{function.__name__}", lambda: Counting(function), batch)
    batches = [batch(SIZE, step) for step in range(2)]
    plain = plain_steps(case, batches)
    bit_equal(train(case, pipeline(2, num_micro_batches=1), batches), plain)
    compare(train(case, pipeline(2), batches), plain)
    assert "int" not in globals()


def test_a_loop_over_samples_is_refused_by_its_line() -> None:
    """An integer of a size may not say how often Python does something."""

    def looped(x: Tensor, lengths: Tensor) -> Tensor:
        return torch.stack([x[place] for place in range(int(x.shape[0]))])

    with pytest.raises(TraceError, match=r"test_integers\.py.*range\(int\(x\.shape\[0\]\)\).*dynamic_batch=False"):
        AutoVaruna(Counting(looped), num_micro_batches=2, **QUIET)(*batch(SIZE, 0)[0])


def test_int_is_given_back() -> None:
    own = torch.Tensor.__int__
    with pytest.raises(KeyError), integers_of_sizes([__name__]):
        assert int is not builtins.int
        raise KeyError
    assert int is builtins.int and torch.Tensor.__int__ is own and "__int__" not in torch.Tensor.__dict__
