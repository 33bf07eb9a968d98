"""Precisions: with the same micro-batches any partition gives the same bits, and one micro-batch those of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.catalogue import CASES, Batch, Case
from tests.catalogue.small import words
from tests.reference import bit_equal, compare
from tests.session.precision import WAYS, Mixed, Trained, plain_in, train_in
from tests.session.training import Setup, on_ranks, pipeline

MIXED = Case("mixed", Mixed, words, has_dropout=True, has_batch_norm=True)
SURE = Case("mixed_sure", lambda: Mixed(0.0), words, has_batch_norm=True)
SETUPS = {
    "two": pipeline(2),
    "three_gpipe": pipeline(3, schedule="gpipe"),
    "two_recompute": pipeline(2, recompute=True, schedule="varuna"),
    "two_zero_bubble": pipeline(2, schedule="zero_bubble"),
    "three_recompute_uneven": pipeline(3, recompute=True, shares=(0.2, 0.9)),
}
_one_stage: dict[str, Trained] = {}


def one_stage(way: str) -> Trained:
    """Returns what one stage gives."""
    if way not in _one_stage:
        _one_stage[way] = train_in(WAYS[way], MIXED, pipeline(1), batches())
    return _one_stage[way]


def batches(num: int = 3) -> list[Batch]:
    """Returns uneven batches."""
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


@pytest.mark.parametrize("way", WAYS)
def test_replicas_change_the_order_of_a_sum_alone(way: str) -> None:
    found = train_in(WAYS[way], CASES["chain"], Setup(((0, 1), (2, 3, 4))), [CASES["chain"].batch(7, 0)])
    expected = train_in(WAYS[way], CASES["chain"], pipeline(1), [CASES["chain"].batch(7, 0)])
    compare(found.record, expected.record, rtol=2e-2 if way == "bfloat16" else 1e-5)


def test_each_call_has_a_precision_of_its_own() -> None:
    """Trains in bfloat16, evaluates in float32, and trains on; outputs have the dtype that plain PyTorch gives them."""
    case = CASES["returned_scores"]
    batch = case.batch(7, 0)

    def run(model: Any, optimizer: Any, rank: int) -> list[Tensor]:
        return calls(model, batch)

    expected = calls(case.model(), batch)
    for found in on_ranks(pipeline(2, num_micro_batches=1), case.model(), run):
        assert [each.dtype for each in found] == [torch.bfloat16, torch.float32, torch.bfloat16]
        assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))


def calls(model: Any, batch: Batch) -> list[Tensor]:
    """Returns outputs in several precisions."""
    bfloat16 = torch.autocast("cpu", dtype=torch.bfloat16)
    outputs = []
    for around in (bfloat16, torch.no_grad(), bfloat16):
        with around:
            outputs.append(model(*batch[0], **batch[1]))
        if outputs[-1].requires_grad:
            outputs[-1].sum().backward()
    assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())
    return [each.detach() for each in outputs]
