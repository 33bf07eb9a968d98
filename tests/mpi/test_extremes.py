"""Steps that are larger than any other."""

from __future__ import annotations

import torch

from tests.mpi.extremes import Tiny, samples
from tests.mpi.launch import run_on_ranks

NUMBER = 20_000


def test_a_step_of_20_000_micro_batches_is_as_in_plain_pytorch() -> None:
    torch.manual_seed(0)  # as the ranks have it
    plain = Tiny()
    expected = plain(samples(NUMBER))
    expected.backward()
    ranks = run_on_ranks(2, "tests.mpi.extremes:many_micro_batches", NUMBER)
    assert {name for _, held in ranks for name in held} == {name for name, _ in plain.named_parameters()}
    for loss, held in ranks:
        torch.testing.assert_close(loss, expected.detach())
        for name, gradient in held.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
