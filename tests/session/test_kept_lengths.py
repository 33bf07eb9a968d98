"""Modules that are kept whole and take lengths, which may not be zero."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autovaruna import AutoVaruna
from tests.catalogue.case import Batch, Case, floats, generator, integers
from tests.reference import compare, plain_steps
from tests.session.training import QUIET, pipeline, train

WIDTH, LENGTH, CLASSES, SIZE = 8, 7, 3, 6


class Packed(nn.Module):
    """Packs sequences for a recurrent layer, and pads what comes of them to their own length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.shape[1])
        return padded


class Sequences(nn.Module):
    """Puts such a layer between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.packed, self.last = nn.Linear(WIDTH, WIDTH), Packed(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.packed(self.first(x), lengths).sum(1) / lengths[:, None]), y)


def batch(size: int, seed: int) -> Batch:
    """Returns sequences of several lengths."""
    g = generator(seed)
    return (floats(size, LENGTH, WIDTH, of=g), 1 + integers(LENGTH, size, of=g), integers(CLASSES, size, of=g)), {}


def test_packed_sequences_train_like_plain_pytorch() -> None:
    """Lengths of zero are refused by torch where the module is tried out, and where its time is measured."""
    case = Case("packed_in_a_module", Sequences, batch)
    batches = [batch(SIZE, step) for step in range(2)]
    compare(train(case, pipeline(2), batches), plain_steps(case, batches))
    AutoVaruna(case.model(), num_micro_batches=2, **QUIET)(*batches[0][0]).backward()
