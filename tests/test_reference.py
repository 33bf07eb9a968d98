"""Holds the comparisons of records, which all tests against plain PyTorch end in."""

from __future__ import annotations

import pytest
import torch

from tests.reference import Record, bit_equal, compare


def record(loss: float, *weights: float) -> Record:
    return Record([torch.tensor(loss)], [], {"w": torch.tensor(weights)}, {})


def test_comparisons_name_what_is_off() -> None:
    bit_equal(record(1.0, 2.0), record(1.0, 2.0))
    compare(record(1.0, 2.0, 1e-8), record(1.0, 2.0, 0.0))
    with pytest.raises(AssertionError, match=r"weight w: differs by 5.00e-09"):
        bit_equal(record(1.0, 2.0, 1e-8), record(1.0, 2.0, 0.0))
    with pytest.raises(AssertionError, match=r"loss of step 0: relative error 1.00e-01"):
        compare(record(1.1, 2.0), record(1.0, 2.0))
    with pytest.raises(AssertionError, match=r"missing: \['weight w'\]"):
        compare(Record([torch.tensor(1.0)]), record(1.0, 2.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_off(bad: float) -> None:
    with pytest.raises(AssertionError, match="weight w: relative error inf"):
        compare(record(1.0, bad), record(1.0, 2.0))
