"""The table of operators: what it lists is there, once, and torch does what a row says."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx

from autovaruna.graph.batch.operators import Means, Trait, operator_of, rows
from autovaruna.graph.batch.values import Merge

aten = torch.ops.aten
X = torch.rand(3, 4) + 0.5
PLAIN = {name: row for name, row in rows().items() if not {"*", "?", "."} & set(name)}


@pytest.mark.parametrize("name", PLAIN)
def test_operators_that_are_listed_are_there(name: str) -> None:
    assert hasattr(aten, name)


@pytest.mark.parametrize("name", [name for name, row in PLAIN.items() if Merge.SUM is row.merge])
def test_totals_that_are_added_are_sums(name: str) -> None:
    operator = getattr(aten, name)
    assert torch.allclose(operator(X).float(), sum(operator(row) for row in X).float())


@pytest.mark.parametrize("name", [name for name, row in PLAIN.items() if row.merge in (Merge.LARGEST, Merge.SMALLEST)])
def test_totals_that_are_extremes_are_those_of_their_parts(name: str) -> None:
    operator = getattr(aten, name)
    assert torch.equal(operator(X), operator(torch.stack([operator(row) for row in X])))


@pytest.mark.parametrize(
    ("target", "means", "takes_kind"),
    [
        (aten.to.other, Means.LINEAR, True),
        (aten.to.dtype, Means.LINEAR, False),
        (aten.sin.default, Means.UNKNOWN, False),
        (torch.ops.prims.sum.default, Means.UNKNOWN, False),
        (getitem, Means.UNKNOWN, False),
    ],
    ids=str,
)
def test_an_overload_may_have_a_row_of_its_own(target: Any, means: Means, takes_kind: bool) -> None:
    """What is no operator of torch's own has none, whatever its name."""
    row = operator_of(fx.Graph().call_function(target))
    assert row.means is means
    assert (Trait.AS_ANOTHER in row.traits) is takes_kind
