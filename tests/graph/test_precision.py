"""Autocast in graphs: what each node runs under, what is done before regions are made, what weights cost."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph.call import describe
from autovaruna.graph.pieces.extract import extract
from autovaruna.graph.precision import current_precision, precision_of, without_autocast
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from autovaruna.profiler.measure import measure

BFLOAT16 = torch.autocast("cpu", dtype=torch.bfloat16)
CPU = torch.device("cpu")


def traced(model: nn.Module, around: Any = nullcontext()) -> TracedModel:  # noqa: B008 - it can be entered again
    """Returns the graph of a call on six samples of four numbers."""
    with around:
        return trace(model, describe(model, (torch.ones(6, 4),), {})[1], CPU)


class Inner(nn.Module):
    """Takes no gradient of what it computes in low precision in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            weights = x @ x.sum(0).unsqueeze(1)
        mean: Tensor = self.last(x * weights.float()).mean()
        return mean


def test_a_region_keeps_its_precision_and_its_grad_mode() -> None:
    """Story: torch.export loses ``torch.no_grad()`` inside ``torch.autocast`` when it makes regions of them."""
    model = Inner()
    graph = traced(model)
    x = torch.randn(6, 4)
    piece = extract(graph, list(graph.block_of), [spec.node for spec in graph.outputs])
    parameters = dict(model.named_parameters())
    arguments = [x if each.name == "x" else parameters[each.name] for each in piece.arguments]
    (found,) = piece.module(*arguments)
    found.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None}
    model.zero_grad()
    expected = model(x)
    expected.backward()
    assert torch.equal(found, expected)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(gradients[name], parameter.grad)


def test_nodes_know_the_autocast_around_the_call_unless_the_model_leaves_it() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                mean: Tensor = self.last(x.float()).mean()
            return mean

    graph = traced(Leaves(), BFLOAT16)
    dtypes = {
        name: (graph.facts[name].value.dtype, [each.dtype for each in precision_of(node)])
        for name, node in graph.nodes.items()
        if name.startswith("linear")
    }
    assert dtypes == {"linear": (torch.bfloat16, [torch.bfloat16]), "linear_1": (torch.float32, [])}


def test_blocks_of_another_precision_are_other_work() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    plain, low = traced(model), traced(model, BFLOAT16)
    assert plain.graph.fingerprint != low.graph.fingerprint
    assert not {block.signature for block in plain.graph.blocks} & {block.signature for block in low.graph.blocks}


@pytest.mark.parametrize("around", [nullcontext(), BFLOAT16], ids=["float32", "bfloat16"])
def test_weights_that_are_cast_count_once_not_once_a_micro_batch(around: Any) -> None:
    """The copy of the weight is memory of the rank; what a micro-batch keeps does not hold it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1024, bias=False))
    graph = traced(model, around)
    copies = sum(block.buffer_bytes for block in graph.graph.blocks)
    assert copies == (2 * (4 * 4 + 4 + 4 * 1024) if around is BFLOAT16 else 0)
    costs = measure(graph, model, [2], CPU, iterations=1)
    assert all(cost.num_bytes.inside < 1024 for cost in costs.values())


def test_autocast_is_given_back_as_it_was() -> None:
    with BFLOAT16:
        before = current_precision()
        with pytest.raises(ValueError), without_autocast():
            assert not current_precision()
            raise ValueError
        assert current_precision() == before
