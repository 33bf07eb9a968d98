"""Models that keep something from their first call on: tables of positions, and how long they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.errors import TraceError
from tests.catalogue.case import Batch, Case, floats, generator
from tests.reference import compare, plain_micro_batched
from tests.session.training import merge, on_ranks, pipeline, train_rank


class Scaled(nn.Module):
    """Scales what a layer makes by a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.length = 0
        self.ready = False

    def forward(self, values: Tensor) -> Tensor:
        """Returns (size, length, 1)."""
        made: Tensor = self.last(torch.relu(self.first(values)) * self.table(values))
        return made

    def table(self, values: Tensor) -> Tensor:
        """Returns (length, 1)."""
        raise NotImplementedError


def positions(values: Tensor) -> Tensor:
    """Makes the table."""
    return torch.arange(values.shape[1], dtype=values.dtype).mul(0.3).cos()[:, None]


class Attribute(Scaled):
    """Keeps a table in an attribute, with its length."""

    cached: Tensor | None = None

    def table(self, values: Tensor) -> Tensor:
        """Makes it anew for longer samples."""
        if self.cached is None or self.length < values.shape[1]:
            self.length, self.cached = values.shape[1], positions(values)
        return self.cached[: values.shape[1]]


class NewBuffer(Scaled):
    """Registers a buffer in its first call."""

    def table(self, values: Tensor) -> Tensor:
        """Makes it once."""
        if not hasattr(self, "made"):
            self.register_buffer("made", positions(values))
        return self.get_buffer("made")


class Grown(Scaled):
    """Has a buffer that is too short, which it writes element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", torch.zeros(1, 1))

    def table(self, values: Tensor) -> Tensor:
        """Makes a longer one."""
        if self.get_buffer("made").shape[0] < values.shape[1]:
            made = torch.empty(values.shape[1], 1)
            made[:, 0] = torch.arange(values.shape[1]) * 0.3
            self.made = made
        return self.get_buffer("made")


class InPlace(Scaled):
    """Fills a part of a buffer, by a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.3), requires_grad=False)
        self.register_buffer("made", torch.zeros(8, 1))

    def table(self, values: Tensor) -> Tensor:
        """Fills what is missing."""
        if self.length < values.shape[1]:
            self.length = values.shape[1]
            self.get_buffer("made")[: self.length, 0] = torch.arange(self.length) * self.rate
        return self.get_buffer("made")[: values.shape[1]]


class OfData(Scaled):
    """Takes a buffer from its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def table(self, values: Tensor) -> Tensor:
        """Fills the buffer once."""
        if not self.ready:
            self.get_buffer("mean").copy_(values.mean())
            self.ready = True
        return self.get_buffer("mean")


class Counting(Scaled):
    """Counts its calls."""

    def table(self, values: Tensor) -> Tensor:
        """Returns something else in each call."""
        self.length += 1
        return positions(values) * self.length


def batch(size: int, seed: int) -> Batch:
    """Returns samples of six positions."""
    return (floats(size, 6, 4, of=generator(seed)),), {}


def case_of(kind: type[Scaled]) -> Case:
    """Returns the case of a model."""
    return Case(kind.__name__, kind, batch, lambda output, _: output.square().mean())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [Attribute, NewBuffer, Grown, InPlace])
def test_what_a_first_call_leaves_is_kept(kind: type[Scaled]) -> None:
    """The model trains as in plain PyTorch, and has the same buffers after that."""
    case, batches = case_of(kind), [batch(4, 0), batch(4, 1)]
    run = lambda model, optimizer, rank: train_rank(case, model, optimizer, batches)  # noqa: E731
    got = merge(on_ranks(pipeline(2, num_micro_batches=2), case.model(), run))
    halves = [[((each[0][0][:2],), {}), ((each[0][0][2:],), {})] for each in batches]
    compare(got, plain_micro_batched(case, halves))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [OfData, Counting])
def test_what_follows_from_inputs_or_changes_again_is_refused(kind: type[Scaled]) -> None:
    """Afterwards the model is as it was before."""
    models: list[Any] = []

    def run(model: Any, optimizer: Any, rank: int) -> None:
        models.append(model.module)
        with pytest.raises(TraceError, match="changes the Python number"):
            model(*batch(4, 0)[0])

    on_ranks(pipeline(2, num_micro_batches=2), kind(), run)
    assert [(model.length, model.ready) for model in models] == [(0, False)] * 2
    assert all(isinstance(each, Tensor) and not each.any() for model in models for each in model.buffers())
