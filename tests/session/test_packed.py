"""Recurrent modules that a forward calls on packed sequences train as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autovaruna import AutoVaruna
from autovaruna.errors import TraceError
from tests.catalogue import Batch, Case
from tests.reference import compare, plain_steps
from tests.session.training import QUIET, pipeline, train

WIDTH, LENGTH, CLASSES = 6, 5, 3


class Reader(nn.Module):
    """Reads sequences of several lengths; `read` says how."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.start = nn.Parameter(torch.full((1, 1, WIDTH), 0.1))
        self.read = read

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.read(self, torch.tanh(self.first(x)), lengths)), y)


def unsorted(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    """Means go over as many places as the longest sequence of the whole batch has."""
    packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    packed, (hidden, _) = model.lstm(packed)
    found, _ = pad_packed_sequence(packed, batch_first=True)
    return found.mean(1) + hidden.sum((0, 2))[:, None]


def sorted_by_hand(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    lengths, order = lengths.sort(descending=True)
    _, (hidden, _) = model.lstm(pack_padded_sequence(x[order], lengths.cpu(), batch_first=True))
    return torch.cat([hidden[-2], hidden[-1]], 1)[order.argsort()]


def in_a_row(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    packed, _ = model.lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    packed, hidden = model.gru(packed, model.start.expand(-1, x.shape[0], -1).contiguous())
    found, lengths = pad_packed_sequence(packed, padding_value=-1.0, total_length=x.shape[1])
    return found.sum(0) / lengths[:, None] + hidden[-1]


def data(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    packed, _ = model.gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    found: Tensor = packed.data
    return found.mean(0).expand(x.shape[0], -1)


def sentences(size: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, LENGTH + 1, (size,), generator=generator)
    x = torch.randn(size, LENGTH, WIDTH, generator=generator)
    return (), {"x": x, "lengths": lengths, "y": torch.arange(size) % CLASSES}


@pytest.mark.parametrize("read", [unsorted, sorted_by_hand, in_a_row])
def test_packed_sequences_train_as_in_plain_pytorch(read: Callable[..., Tensor]) -> None:
    case = Case(read.__name__, lambda: Reader(read), sentences)
    batches = [case.batch(7, step) for step in range(2)]
    compare(train(case, pipeline(2), batches), plain_steps(case, batches))


def test_what_is_done_with_packed_numbers_is_refused() -> None:
    with pytest.raises(TraceError, match=r"takes mean of a packed sequence at .*test_packed"):
        AutoVaruna(Reader(data), num_micro_batches=2, **QUIET)(**sentences(4, 0)[1])


def test_lengths_in_a_list_are_refused() -> None:
    class Listed(Reader):
        def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
            packed, _ = self.gru(pack_padded_sequence(x, [LENGTH] * 4, batch_first=True))  # type: ignore[arg-type]
            return pad_packed_sequence(packed)[0].mean()

    with pytest.raises(TraceError, match="by lengths that are no tensor"):
        AutoVaruna(Listed(data), num_micro_batches=2, **QUIET)(**sentences(4, 0)[1])
