"""Holds what `measure` promises: each distinct block once, failures that name it, and nothing of the user's changed."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from autovaruna.errors import MeasureError
from autovaruna.profiler.measure import measure, merge, to_profile
from autovaruna.profiler.work import block_parts
from tests.profiler.models import CPU, WIDTH, Mlp, profile, traced, traced_case


class Factor(nn.Module):
    """Fails whatever comes in: its own matrix has no inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.matrix: Tensor
        self.register_buffer("matrix", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        solved: Tensor = torch.linalg.solve(self.matrix, self.inner(x))
        return solved.sum()


def test_identical_blocks_are_measured_once() -> None:
    """Ten equal layers cost as many measurements as five."""
    few, many = (len(measure(traced(m := Mlp(n), torch.zeros(3, WIDTH)), m, [2], CPU)) for n in (30, 60))
    assert few == many
    model = traced(Mlp(60), torch.zeros(3, WIDTH))
    assert len({part.signature for part in block_parts(model)}) < 6 < len(model.graph.blocks)


def test_a_block_that_raises_is_named() -> None:
    """A failed measurement is an error that says block, module, size and reason; it is never filled in."""
    model = Factor()
    graph = traced(model, torch.zeros(3, 4, 4))
    with pytest.raises(MeasureError, match=r"solve.*5 samples.*singular") as caught:
        measure(graph, model, [5], CPU)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("name", ["dropout", "batch_norm", "moving_average", "constant"])
def test_nothing_of_the_user_is_touched(name: str) -> None:
    """Parameters, their gradients, buffers and the generator are what they were."""
    model, graph, tensors = traced_case(name, 3)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    generator, inputs = torch.get_rng_state(), [tensor.clone() for tensor in tensors]
    measure(graph, model, [2], CPU, inputs=tensors)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(map(torch.equal, tensors, inputs))


def test_a_model_on_meta_is_measured() -> None:
    """No rank needs to hold the model that it measures."""
    with torch.device("meta"):
        model = Mlp(2)
    graph = traced(model, torch.zeros(3, WIDTH))
    costs = profile(graph, model, [4], CPU).costs[0]
    assert all(cost.forward_seconds > 0 for cost in costs)


def test_ranks_share_the_work() -> None:
    """Each part is measured by one rank, parts travel between ranks, and together they are a profile."""
    model, graph, tensors = traced_case("three_users", 4)
    shares = [measure(graph, model, [1, 4], CPU, share=(rank, 3), inputs=tensors) for rank in range(3)]
    assert not set(shares[0]) & set(shares[1]) and not set(shares[1]) & set(shares[2])
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    found = to_profile(graph, merge(pickle.loads(pickle.dumps(shares))), CPU)
    assert found.micro_batch_sizes == (1, 4)
    assert [len(costs) for costs in found.costs] == [len(graph.graph.blocks)] * 2
    assert found.fingerprint == graph.graph.fingerprint


def test_without_gradients_there_is_no_backward() -> None:
    """A model traced under no_grad has backward 0, saves nothing, and still takes time."""
    model = Mlp(3)
    with torch.no_grad():
        graph = traced(model, torch.zeros(3, WIDTH))
    costs = profile(graph, model, [2], CPU).costs[0]
    assert all(cost.backward_seconds == 0 and cost.saved_bytes == 0 for cost in costs)
    assert all(cost.forward_seconds > 0 for cost in costs)


def test_progress_is_told() -> None:
    """The callback hears of each part and of the total."""
    model, heard = Mlp(3), []
    graph = traced(model, torch.zeros(3, WIDTH))
    costs = measure(graph, model, [2], CPU, on_progress=lambda done, total: heard.append((done, total)))
    assert heard == [(done + 1, len(costs)) for done in range(len(costs))]


def test_a_spent_budget_still_measures_everything() -> None:
    """With no time at all each part is sampled once, and none is left out."""
    model, graph, tensors = traced_case("conv_net", 4)
    full, hasty = (measure(graph, model, [4], CPU, budget_seconds=b, inputs=tensors) for b in (1.0, 0.0))
    assert set(full) == set(hasty)
    assert all(cost.forward_seconds > 0 for cost in hasty.values())
