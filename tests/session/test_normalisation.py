"""Batch normalisations count over micro-batches of a size that is said and can be set; synchronised ones, over all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError
from tests.session.training import on_ranks, pipeline


def model(is_synchronised: bool = False) -> nn.Module:
    """Makes a model with a normalisation."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    return nn.SyncBatchNorm.convert_sync_batchnorm(made) if is_synchronised else made  # type: ignore[no-untyped-call,no-any-return]


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def output(wrapped: Any, optimizer: Any, rank: int) -> Tensor:
    """Calls the model."""
    return wrapped(X).detach()  # type: ignore[no-any-return]


def test_synchronised_statistics_of_parts_are_refused() -> None:
    """Once, they were those of each micro-batch, without a word."""

    def run(wrapped: AutoVaruna, optimizer: Any, rank: int) -> None:
        with pytest.raises(InputError, match=r"1 is a SyncBatchNorm.*num_micro_batches=1.*batch_norm_samples"):
            wrapped(X)

    on_ranks(pipeline(2, num_micro_batches=4), model(True), run)


def test_synchronised_statistics_of_all_are_exact() -> None:
    for found in on_ranks(pipeline(2, num_micro_batches=1), model(True), output):
        torch.testing.assert_close(found, model()(X).detach())


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_the_log_says_what_is_counted_over(num_micro_batches: int, caplog: pytest.LogCaptureFixture) -> None:
    on_ranks(pipeline(2, num_micro_batches=num_micro_batches), model(), output)
    told = [
        each.getMessage()
        for each in caplog.records
        if "count over micro-batches of 4 samples, of 8;" in each.getMessage()
    ]
    assert len(told) == num_micro_batches - 1


def test_the_size_can_be_set() -> None:
    wrapped = AutoVaruna(model(), batch_norm_samples=4, load_deployment=False, save_deployment=False, progress=False)
    plain = model()
    expected = torch.cat([plain(X[:4]), plain(X[4:])]).detach()
    torch.testing.assert_close(wrapped(X).detach(), expected)
    assert wrapped.plan is not None and wrapped.plan.num_micro_batches == 2
