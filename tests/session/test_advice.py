"""Each doubt about the batch dimension has a refusal of its own, and the settings that it names make the model run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, TraceError
from autovaruna.errors import PlanError
from tests.reference import Record, compare, gradients_of, sgd
from tests.session.training import QUIET, Setup, on_ranks

WIDTH, TOKENS = 8, 11
WHOLE = {"inputs": "replicated", "num_micro_batches": 1, "dynamic_batch": False}
TOGETHER = r"inputs='replicated', num_micro_batches=1, dynamic_batch=False together"


class Positions(nn.Module):
    """Has room for so many."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5000, 1, WIDTH, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[0]]  # the positions


class Words(nn.Module):
    """Takes (time, batch) through an encoder, with a mask made from the length of what it is given."""

    def __init__(self, has_positions: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(TOKENS, WIDTH), Positions() if has_positions else nn.Identity()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0)
        self.layers, self.last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, TOKENS)

    def forward(self, src: Tensor, y: Tensor) -> Tensor:
        length = src.shape[0] if isinstance(self.places, Positions) else len(src)  # the length
        h = self.places(self.words(src))
        h = self.layers(h, mask=torch.log(torch.tril(torch.ones(length, length))))
        return F.cross_entropy(self.last(h).flatten(0, 1), y.flatten())


class Recurrent(nn.Module):
    """Takes a hidden state, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.last = nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return self.last(self.cell(x, state)[0]).square().mean()  # type: ignore[no-any-return]


class Nodes(nn.Module):
    """Joins nodes by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, joined: Tensor) -> Tensor:
        return self.last(joined @ self.first(x).relu()).log_softmax(1)[:, 0].mean().neg()


class Actor(nn.Module):
    """Takes one observation, and returns a loss of what it would do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.action, self.value = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 1)

    def forward(self, state: Tensor) -> Tensor:
        h = self.first(state).relu()
        return self.action(h).softmax(-1)[0].log().neg() + self.value(h)[0].square()


class Pictures(nn.Module):
    """Takes a list of images of their own sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, images: list[Tensor], y: Tensor) -> Tensor:
        h = torch.stack([self.first(each).mean((1, 2)) for each in images])
        return F.cross_entropy(self.last(h), y)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


WORDS = (torch.arange(30).reshape(5, 6) % TOKENS, torch.arange(1, 31).reshape(5, 6) % TOKENS)
CAUSES: dict[str, tuple[nn.Module, tuple[Any, ...], str]] = {
    "time first": (Words(False), WORDS, r"# the length\).*batch_first=False\) takes the first one for time.*"),
    "positions": (Words(True), WORDS, r"# the positions\): it holds for batch <= 5000 alone.*batch_first=True.*"),
    "state": (Recurrent(), (random(5, 6, WIDTH), (random(1, 6, WIDTH),) * 2), r"which state_0 \(1, 6, 8\), .*"),
    "graph": (Nodes(), (random(7, 4), random(7, 7)), r"joined \(7, 7\) joins rows of x \(7, 4\).*"),
    "observation": (Actor(), (random(4),), r"state \(4,\) looks like one sample.*unsqueeze\(0\).*"),
    "images": (Pictures(), ([random(3, 8, 8), random(3, 9, 9)], torch.tensor([0, 1])), r"in a list \(images_0, .*"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_doubt_about_the_batch_names_its_cause_line_and_settings(cause: str) -> None:
    model, arguments, words = CAUSES[cause]
    with pytest.raises(TraceError, match=rf"test_advice\.py:\d+ \(.*{words}{TOGETHER}"):
        AutoVaruna(model, num_micro_batches=2, **QUIET)(*arguments)


@pytest.mark.parametrize("cause", CAUSES)
def test_those_settings_have_the_numbers_of_plain_pytorch(cause: str) -> None:
    model, arguments, _ = CAUSES[cause]
    model.zero_grad()
    loss = model(*arguments)
    loss.backward()

    def step(wrapped: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Record:
        found = wrapped(*arguments)
        found.backward()
        return Record(losses=[found.detach()], gradients=[gradients_of(wrapped.module)])

    expected = Record(losses=[loss.detach()], gradients=[gradients_of(model)])
    model.zero_grad()
    for record in on_ranks(Setup(((0, 1),), 1, settings=WHOLE), model, step, sgd):
        compare(record, expected)


class Signs(nn.Module):
    """Goes through NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * torch.from_numpy(np.sign(x.numpy()))).mean()


class Dropped(nn.Module):
    """Draws from NumPy's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) if np.random.rand() < 0.5 else x).mean()


@pytest.mark.parametrize(("model", "words"), [(Signs(), r"np\.sign.*NumPy.*torch\.sign"), (Dropped(), r"draws from")])
def test_what_is_no_control_flow_is_not_called_so(model: nn.Module, words: str) -> None:
    with pytest.raises(TraceError, match=words) as caught:
        AutoVaruna(model, num_micro_batches=2, **QUIET)(random(4, 4))
    assert "control flow" not in str(caught.value)


class TwoSteps(torch.optim.SGD):
    """Wants a closure, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it requires a closure"
        return super().step(closure)


def test_an_optimizer_that_wants_a_closure_is_told_the_settings() -> None:
    model = Nodes()
    with pytest.raises(PlanError, match=r"(?s)requires a closure.*optimizer_bytes_factor.*num_stages=1 and num"):
        wrapped = AutoVaruna(model, TwoSteps(model.parameters(), lr=0.1), **WHOLE, **QUIET)
        wrapped(random(7, 4), random(7, 7))


@pytest.mark.parametrize("has_positions", (True, False))
def test_an_encoder_with_a_mask_made_from_the_length_runs_once_the_batch_is_named(has_positions: bool) -> None:
    model = Words(has_positions)
    loss = model(*WORDS)
    loss.backward()
    expected = Record(losses=[loss.detach()], gradients=[gradients_of(model)])
    model.zero_grad()
    wrapped = AutoVaruna(model, num_micro_batches=2, batch_dims={"src": 1, "y": 1}, **QUIET)
    found = wrapped(*WORDS)
    found.backward()
    compare(Record(losses=[found.detach()], gradients=[gradients_of(wrapped.module)]), expected)
