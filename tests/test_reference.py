"""Holds the reference itself: cutting and joining batches, micro-batches against whole batches, the comparisons."""

from __future__ import annotations

import pytest
import torch

from tests.catalogue import CASES, batch_size, tensors
from tests.reference import Record, adamw, bit_equal, compare, join, part, plain_micro_batched, plain_steps, ranges

CASE = CASES["nested_inputs"]


def test_parts_of_a_batch_join_to_it() -> None:
    batch = CASE.batch(7, 0)
    joined = join([part(batch, start, stop) for start, stop in ranges(7, 3)])
    assert [batch_size(part(batch, *bounds)) for bounds in ranges(7, 3)] == [3, 2, 2]
    assert all(torch.equal(a, b) for a, b in zip(tensors(joined), tensors(batch), strict=True))


def test_a_tensor_without_samples_stays_whole() -> None:
    weights = part(CASE.batch(7, 0), 1, 3)[1]["weights"]
    assert torch.equal(weights, CASE.batch(7, 0)[1]["weights"])


@pytest.mark.parametrize("name", ["nested_inputs", "tied_three_ways", "gpt2", "conv_net"])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_micro_batches_give_the_gradient_of_the_whole(name: str, max_norm: float | None) -> None:
    case = CASES[name].without_dropout()
    batches = [case.batch(7, step) for step in range(4)]
    whole = plain_steps(case, batches, adamw, max_norm, num_accumulated=2)
    cut = [[part(batch, *bounds) for bounds in ranges(7, 3)] for batch in batches]
    compare(plain_micro_batched(case, cut, adamw, max_norm, num_accumulated=2), whole)
    assert len(whole.losses) == 4 and len(whole.gradients) == 2


def test_batch_norm_depends_on_the_micro_batches() -> None:
    case = CASES["batch_norm"]
    batch = case.batch(6, 0)
    cut = [[part(batch, *bounds) for bounds in ranges(6, 2)]]
    with pytest.raises(AssertionError, match=r"buffer body.4.running_mean: relative"):
        compare(plain_micro_batched(case, cut), plain_steps(case, [batch]), rtol=1.0)


def record(loss: float, *weights: float) -> Record:
    """Returns a record of one loss and one weight."""
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
