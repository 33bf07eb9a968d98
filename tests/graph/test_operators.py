"""The table of operators: what it lists is there, once, and torch does what a row says."""

from __future__ import annotations

import pytest
import torch

from autovaruna.graph.batch.operators import Means, Trait, operator_of, rows
from autovaruna.graph.batch.values import Merge
from tests.graph.models import traced_function

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


def test_an_overload_may_have_a_row_of_its_own_and_other_names_have_none() -> None:
    """Of a dtype that is another tensor's, its numbers are not taken; an operator of another library is not known."""
    traced = traced_function(lambda self, x, y: (x.to(y), x.to(torch.float64), x.sin()), X, X.double())
    found = [operator_of(node) for node in traced.module.graph.find_nodes(op="call_function")]
    assert [Trait.AS_ANOTHER in row.traits for row in found] == [True, False, False]
    assert [row.means for row in found] == [Means.LINEAR, Means.LINEAR, Means.UNKNOWN]
