"""Holds the roofline: arithmetic as torch counts it, bytes as they are measured, every model of the catalogue."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from autovaruna.errors import MeasureError
from autovaruna.graph.facts import flop_counter
from autovaruna.profiler import bytes
from autovaruna.profiler.roofline import (
    AllReduceRates,
    Bandwidth,
    Compute,
    DeviceLink,
    DeviceSpec,
    optimizer_cost,
    predict,
)
from tests.catalogue import CASES
from tests.catalogue.small import Written
from tests.products import some
from tests.profiler.models import WIDTH, Mlp, on_cpu, profile, traced, traced_case

LINK = DeviceLink(1e10, 1e-6)
SPEC = DeviceSpec("test", "cpu", Compute(1e12), Bandwidth(1e11), LINK, LINK, AllReduceRates(1e10, 1e10))
COMPUTE = replace(SPEC, memory_bandwidth=Bandwidth(1e30))
"""Only arithmetic counts: seconds times 1e12 are operations."""


@pytest.mark.parametrize("name", some(["gpt2", "t5", "lstm", "conv_net_batch_norm", "frozen", "tied"], 3))
def test_arithmetic_is_that_of_the_real_forward_and_backward(name: str) -> None:
    """What needs no gradient has no backward, a first layer computes one product less."""
    model, graph, _ = traced_case(name, 2)
    args, kwargs = on_cpu(CASES[name], 4)[1]
    with flop_counter() as forward:
        result = model(*args, **kwargs)
    with flop_counter() as backward:
        (result if isinstance(result, Tensor) else result.loss).backward()
    costs = predict(graph, model, [4], COMPUTE).costs[0]
    assert 1e12 * sum(cost.forward_seconds for cost in costs) == pytest.approx(forward.get_total_flops(), rel=0.01)
    assert 1e12 * sum(cost.backward_seconds for cost in costs) == pytest.approx(backward.get_total_flops(), rel=0.01)


def test_attention_and_recurrent_layers_count_their_products() -> None:
    query, key, value = (torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3))
    with flop_counter() as kernel:
        torch.nn.functional.scaled_dot_product_attention(query, key, value)
    with flop_counter() as products:
        (query @ key.transpose(-1, -2)).softmax(-1) @ value
    assert kernel.get_total_flops() == products.get_total_flops() > 0
    lstm = nn.LSTM(8, 16, num_layers=2, bidirectional=True)
    with flop_counter() as counter:
        lstm(torch.randn(5, 3, 8))
    assert counter.get_total_flops() == 2 * 5 * 3 * sum(w.numel() for w in lstm.parameters() if w.dim() == 2)


@pytest.mark.parametrize("name", some(["gpt2", "t5", "resnet", "bert", "dropout", "moving_average"], 3))
def test_bytes_are_those_that_are_counted_when_a_model_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what kernels take for themselves: only who runs them finds out."""
    monkeypatch.setattr(bytes, "is_profiler_enabled", lambda: True)
    model, graph, tensors = traced_case(name, 3)
    predicted = predict(graph, model, [4], SPEC).costs[0]
    measured = profile(graph, model, [4], iterations=1, budget_seconds=0, inputs=tensors).costs[0]
    for what in ("saved_bytes", "work_bytes"):
        found, real = (sum(getattr(cost, what) for cost in costs) for costs in (predicted, measured))
        assert found == pytest.approx(real, rel=0.1)


def test_seconds_are_the_greatest_of_arithmetic_bytes_and_the_least_time_and_say_that_they_are_predicted() -> None:
    model = Mlp(1)
    graph = traced(model, torch.zeros(3, WIDTH))

    def forward(**limits: Any) -> float:
        spec = replace(SPEC, **{"compute": Compute(1e30), "memory_bandwidth": Bandwidth(1e30)} | limits)
        return sum(cost.forward_seconds for cost in predict(graph, model, [8], spec).costs[0])

    num_elements = 8 * WIDTH
    product = num_elements + WIDTH * WIDTH + WIDTH + num_elements
    relu, square, mean = 2 * num_elements, 2 * num_elements, num_elements + 1
    assert forward(compute=Compute(1.0)) == pytest.approx(2 * 8 * WIDTH * WIDTH)
    assert forward(memory_bandwidth=Bandwidth(4.0)) == pytest.approx(product + relu + square + mean)
    assert forward(operation_seconds=1.0) == pytest.approx(4)
    predicted = predict(graph, model, [1, 4], SPEC)
    assert not predicted.is_measured and predicted.device == "test" and predicted.micro_batch_sizes == (1, 4)
    assert optimizer_cost(SPEC, 2.0).seconds(1, 100) == pytest.approx(700 / 1e11)


def test_a_model_on_meta_is_predicted_and_a_second_layer_costs_nothing_to_predict() -> None:
    told: list[tuple[int, int]] = []
    for num_layers in (14, 28):
        with torch.device("meta"):
            model = Mlp(num_layers)
        predict(traced(model, torch.zeros(3, WIDTH)), model, [2], SPEC, lambda *done: told.append(done))
    few, many = (total for done, total in told if done == total)
    assert few == many


def test_a_block_that_needs_numbers_is_named() -> None:
    def chosen(self: nn.Module, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x[x > 0].sum()

    model = Written(chosen, linear=nn.Linear(WIDTH, WIDTH))
    graph = traced(model, torch.zeros(3, WIDTH))
    with pytest.raises(MeasureError, match=r"index.*measure the model instead"):
        predict(graph, model, [2], SPEC)
