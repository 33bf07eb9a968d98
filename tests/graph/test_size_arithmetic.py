"""Holds that arithmetic on symbolic sizes that is recalled is the arithmetic that torch does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from autovaruna.graph.export.batch_size import cached_size_arithmetic

OPERATIONS = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min")


@pytest.fixture
def nodes() -> Iterator[list[Any]]:
    """Yields sizes: two symbols, a number, and what is made of them."""
    symbols = ShapeEnv()
    one, two = (_symbol(symbols, name, hint) for name, hint in (("a", 7), ("b", 11)))
    yield [one, two, one.wrap_int(3), one.mul(two), one.add(one.wrap_int(1))]


def _symbol(symbols: ShapeEnv, name: str, hint: int) -> Any:
    source: Any = ConstantSource(name)
    expression = symbols.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    size: Any = symbols.create_symintnode(expression, hint=hint, source=source)
    return size.node


def _told(node: Any) -> tuple[Any, ...]:
    return node.expr, node.hint, node.pytype, node.constant, node._optimized_summation


@pytest.mark.parametrize("name", OPERATIONS)
def test_recalled_results_are_torchs(name: str, nodes: list[Any]) -> None:
    pairs = list(product(nodes, nodes))
    expected = [_told(getattr(one, name)(two)) for one, two in pairs]
    with cached_size_arithmetic():
        for _ in range(2):
            assert [_told(getattr(one, name)(two)) for one, two in pairs] == expected


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch has not what caching takes")
def test_a_repeated_operation_runs_once_and_makes_a_new_size(nodes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = SymNode.mul  # type: ignore[attr-defined]
    monkeypatch.setattr(SymNode, "mul", lambda one, two: (runs.append(one), run(one, two))[1])
    with cached_size_arithmetic():
        first, second = nodes[0].mul(nodes[1]), nodes[0].mul(nodes[1])
    assert len(runs) == 1 and first is not second


def test_a_symbol_that_is_replaced_is_not_recalled(nodes: list[Any]) -> None:
    one, two = nodes[0], nodes[1]
    with cached_size_arithmetic():
        assert one.maybe_as_int() is None and not one.add(two).expr.is_number
        one.shape_env._set_replacement(one.expr, one.wrap_int(7).expr, "known now")
        assert one.maybe_as_int() == 7 and one.add(two).expr == 7 + two.expr


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch has not what caching takes")
def test_torch_is_as_it_was_afterwards() -> None:
    before = dict(vars(SymNode))
    with cached_size_arithmetic():
        assert vars(SymNode)["add"] is not before["add"]
    assert dict(vars(SymNode)) == before
