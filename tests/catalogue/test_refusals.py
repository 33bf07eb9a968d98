"""Holds the library to this: it gives the numbers of plain PyTorch, or refuses a model and says why."""

from __future__ import annotations

import pytest
from torch import nn

from autovaruna import AutoVaruna, TraceError
from tests.catalogue import REFUSED, Case
from tests.reference import Record, compare, gradients_of, part, plain_micro_batched, ranges

QUIET = {"progress": False, "load_deployment": False, "save_deployment": False}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_right_or_refused(case: Case) -> None:
    case = case.without_dropout()
    batch = case.batch(6, 1)
    model: nn.Module = AutoVaruna(case.model(), num_micro_batches=3, **QUIET)
    try:
        loss = case.loss_of(model(*batch[0], **batch[1]), batch)
    except TraceError as error:
        assert "Expected" in str(error)
        return
    loss.backward()
    if case.is_always_random:  # the seed decides what it draws; that no plan changes it is for test_kept.py
        assert loss.isfinite()
        return
    plain = plain_micro_batched(case, [[part(batch, *bounds) for bounds in ranges(6, 3)]])
    compare(Record([loss.detach()], [gradients_of(model)]), Record(plain.losses, plain.gradients))
