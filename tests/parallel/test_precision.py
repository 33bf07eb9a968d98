"""Precisions: with the same micro-batches any partition gives the same bits, and one micro-batch those of PyTorch."""

from __future__ import annotations

import pytest

from tests.catalogue import Case
from tests.catalogue.small import words
from tests.parallel.precision import WAYS, Mixed, Trained, plain_in, train_in
from tests.parallel.training import pipeline
from tests.reference import bit_equal

MIXED = Case("mixed", Mixed, words, has_dropout=True, has_batch_norm=True)
SURE = Case("mixed_sure", lambda: Mixed(0.0), words, has_batch_norm=True)
SETUPS = {
    "two": pipeline(2),
    "three_gpipe": pipeline(3, schedule="gpipe"),
    "two_recompute": pipeline(2, recompute=True, schedule="varuna"),
    "three_recompute_uneven": pipeline(3, recompute=True, shares=(0.2, 0.9)),
}
_one_stage: dict[str, Trained] = {}


def one_stage(way: str) -> Trained:
    """Returns what one stage gives."""
    if way not in _one_stage:
        _one_stage[way] = train_in(WAYS[way], MIXED, pipeline(1), batches())
    return _one_stage[way]


def batches(num: int = 3) -> list:
    return [MIXED.batch(7, step) for step in range(num)]


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("way", WAYS)
def test_no_partition_changes_a_bit(way: str, setup: str) -> None:
    found = train_in(WAYS[way], MIXED, SETUPS[setup], batches())
    bit_equal(found.record, one_stage(way).record)
    assert found.scales == one_stage(way).scales


@pytest.mark.parametrize("way", WAYS)
def test_one_micro_batch_gives_the_bits_of_plain_pytorch(way: str) -> None:
    found = train_in(WAYS[way], SURE, pipeline(3, num_micro_batches=1), batches())
    expected = plain_in(WAYS[way], SURE, batches())
    bit_equal(found.record, expected.record)
    assert found.scales == expected.scales
