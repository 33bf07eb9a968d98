"""Holds that sizes are right for every micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph.records import Size
from autovaruna.graph.trace import trace
from tests.graph.models import CPU, Function, call_of, named, traced, traced_function

X = torch.zeros(3, 4)


def shaped(self: nn.Module, x: Tensor) -> Tensor:
    """Makes values whose sizes depend on the batch in several ways."""
    out = self.layer(x)
    table = torch.arange(6, device=x.device).float()
    pairs = torch.cat((out, out)).reshape(x.shape[0], 8)
    words = x.long()
    padded = torch.cat((words, words.new_zeros(2, 4)))
    return pairs.sum() + padded.sum() + table.sum()


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 64])
def test_shapes_are_those_of_the_run(batch_size: int) -> None:
    """Every value of the graph has, for any batch size, the shape and bytes that a run of that size makes."""
    model = Function(shaped, layer=nn.Linear(4, 4))
    found = traced(model, X)
    seen: dict[str, Tensor] = {}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                seen[n.name] = value
            return value

        def fetch_attr(self, target: str) -> object:
            return model.get_parameter(target)

    Watch(found.module).run(torch.zeros(batch_size, 4), enable_io_processing=False)
    for name, value in seen.items():
        fake = found.nodes[name].meta.get("val")
        if isinstance(fake, Tensor):
            assert found.sizes.shape(fake, batch_size) == value.shape, name
            assert found.sizes.num_bytes(fake).at(batch_size) == value.numel() * value.element_size(), name


def test_bytes_have_a_fixed_part_and_one_that_grows() -> None:
    """A padded value is a line with both; a table is all fixed; an activation all grows."""
    model = traced_function(shaped, X, layer=nn.Linear(4, 4))
    sizes = {name: model.sizes.num_bytes(model.nodes[name].meta["val"]) for name in ("linear", "cat_1")}
    assert sizes == {"linear": Size(0.0, 16.0), "cat_1": Size(64.0, 32.0)}
    assert model.sizes.num_bytes(model.nodes[named(model, "arange")].meta["val"]).sample_bytes == 0


def test_numbers_that_follow_from_the_batch_are_sizes() -> None:
    """x.shape[0] and what is computed from it are numbers, not blocks."""

    def halved(self: nn.Module, x: Tensor) -> Tensor:
        return self.layer(x).reshape(x.shape[0] * 2, 2)

    model = traced_function(halved, X, layer=nn.Linear(4, 4))
    sizes = [node for node in model.nodes.values() if model.sizes.is_given(node)]
    assert sizes and not {node.name for node in sizes} & model.block_of.keys()
    assert model.sizes.number(sizes[-1].meta["val"], 5) == 10


def test_the_batch_dimension_is_found_wherever_it_is() -> None:
    """It may be moved; a value without one has None."""

    def moved(self: nn.Module, x: Tensor) -> Tensor:
        return self.layer(x).t().exp().sum(dim=1)

    model = traced_function(moved, X, layer=nn.Linear(4, 4))
    found = {start: model.sizes.batch_dimension(model.nodes[named(model, start)].meta["val"])
             for start in ("linear", "exp", "sum")}  # fmt: skip
    assert found == {"linear": 0, "exp": 1, "sum": None}


def test_a_graph_for_one_size_has_plain_numbers() -> None:
    """Without a batch symbol every shape is that of the one micro-batch."""
    model = nn.Linear(4, 5)
    found = trace(model, call_of(model, X), CPU, is_dynamic=False, micro_batch_size=3)
    value = found.nodes["linear"].meta["val"]
    assert found.sizes.shape(value, 3) == (3, 5)
    assert found.sizes.num_bytes(value).at(3) == 3 * 5 * 4
    assert found.sizes.batch_dimension(value) == 0 and not found.sizes.mixes_samples(value)
