"""Models whose batch is not the first dimension: ``batch_dims`` names it, and the numbers are plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.errors import AutoVarunaError, ConfigError, InputError
from tests.reference import sgd
from tests.session.training import Setup, on_ranks, pipeline, with_state
from tests.reference import Record

WORDS, WIDTH, LAYERS, BATCH = 20, 8, 2, 5
Hidden = tuple[Tensor, Tensor]


class Language(nn.Module):
    """Is PyTorch's own example of a language model: words ``(time, batch)``, rows of all of them as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, LAYERS)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, WORDS)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, batch: int) -> Hidden:
        weight = next(self.parameters())
        return weight.new_zeros(LAYERS, batch, WIDTH), weight.new_zeros(LAYERS, batch, WIDTH)


class Translator(nn.Module):
    """Is an encoder and a decoder as ``nn.Transformer`` has them: time first, masks beside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, 1, 1, 16, 0.0, "gelu")
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, src: Tensor, tgt: Tensor, tgt_mask: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        hidden = self.body(
            self.embed(src), self.embed(tgt), tgt_mask=tgt_mask, src_key_padding_mask=src_key_padding_mask
        )
        return self.head(hidden)


def made(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind()


def words(seed: int, *shape: int) -> Tensor:
    return torch.randint(1, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def columns(tensor: Tensor, sizes: Sequence[int], rank: int, dimension: int = 1) -> Tensor:
    """Returns the samples of a rank; all of them where ranks are not given some of their own."""
    return tensor.split(list(sizes), dimension)[rank].contiguous() if sizes else tensor


def train_language(model: Any, optimizer: Any, lengths: Sequence[int], sizes: Sequence[int] = (), rank: int = 0) -> Any:
    """Trains over parts of one text, with the hidden state from call to call; returns losses and results."""
    own = sizes[rank] if sizes else BATCH
    hidden: Hidden = (torch.zeros(LAYERS, own, WIDTH), torch.zeros(LAYERS, own, WIDTH))
    record, outputs = Record(), []
    for step, length in enumerate(lengths):
        text = columns(words(step, length + 1, BATCH), sizes, rank)
        hidden = (hidden[0].detach(), hidden[1].detach())
        output, hidden = model(text[:-1], hidden)
        loss = F.nll_loss(output, text[1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs += [output.detach().view(length, own, WORDS), hidden[0].detach(), hidden[1].detach()]
    return outputs, record


def compare_language(setup: Setup, lengths: Sequence[int], sizes: Sequence[int] = ()) -> None:
    plain: Any = made(Language)
    begin = copy.deepcopy(plain)
    expected, _ = train_language(plain, sgd(plain.parameters()), lengths)

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Any:
        outputs, record = train_language(model, optimizer, lengths, sizes, rank)
        return outputs, with_state(record, model).weights

    for rank, (outputs, weights) in enumerate(on_ranks(setup, begin, run)):
        for found, right in zip(outputs, expected, strict=True):
            torch.testing.assert_close(found, columns(right, sizes, rank))
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, msg=lambda text, n=name: f"{n}: {text}")


DIMS = {"batch_dims": {"words": 1, "hidden": 1}}


@pytest.mark.parametrize(
    ("setup", "sizes"),
    [
        (pipeline(2, num_micro_batches=2, settings=DIMS), ()),
        (pipeline(2, num_micro_batches=4, settings={**DIMS, "inputs": "per_rank"}), (3, 2)),
        (pipeline(1, num_micro_batches=3, settings=DIMS), ()),
    ],
    ids=["replicated", "uneven", "one process"],
)
def test_a_language_model_hands_its_state_from_call_to_call(setup: Setup, sizes: Sequence[int]) -> None:
    compare_language(setup, (4, 4, 4), sizes)
