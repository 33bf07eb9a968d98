"""Models that keep something from their first call on: it is made before they are wrapped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.errors import TraceError
from tests.catalogue.case import Batch, floats, generator
from tests.reference import sgd
from tests.session.training import QUIET, on_ranks, pipeline


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


def batch(size: int, seed: int) -> Batch:
    """Returns samples of six positions."""
    return (floats(size, 6, 4, of=generator(seed)),), {}


def train(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Makes two steps, after a call that leaves what it leaves."""
    for step in range(3):
        model(*batch(4, step)[0]).square().mean().backward()
        if step:
            optimizer.step()
        optimizer.zero_grad()
    return {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("kind", [Attribute, NewBuffer, Grown, InPlace])
def test_what_a_first_call_leaves_is_made_before_the_model_is_wrapped(kind: type[Scaled]) -> None:
    """The refusal says so; then the model trains as in plain PyTorch."""
    torch.manual_seed(0)
    plain = kind()
    warm, cold = copy.deepcopy(plain), copy.deepcopy(plain)
    with pytest.raises(TraceError, match="run one batch through the model before it is wrapped"):
        AutoVaruna(cold, num_micro_batches=2, **QUIET)(*batch(4, 0)[0])
    warm(*batch(4, 0)[0])
    found = on_ranks(pipeline(2, num_micro_batches=2), warm, lambda model, optimizer, rank: train(model, optimizer))
    expected = train(plain, sgd(plain.parameters()))
    for state in found:
        torch.testing.assert_close(state, expected)


class Counting(Scaled):
    """Counts its calls, and returns something else in each."""

    def table(self, values: Tensor) -> Tensor:
        self.length += 1
        return positions(values) * self.length


def test_a_count_of_calls_is_refused() -> None:
    """Afterwards the model is as it was before."""
    model = Counting()
    with pytest.raises(TraceError, match="changes the Python number length"):
        AutoVaruna(model, num_micro_batches=2, **QUIET)(*batch(4, 0)[0])
    assert model.length == 0
