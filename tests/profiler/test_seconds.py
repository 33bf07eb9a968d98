"""Holds that the seconds of blocks add up to what the whole model takes, as well as a busy machine lets one say."""

from __future__ import annotations

from statistics import median
from time import process_time

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph.call import describe
from autovaruna.graph.traced import trace
from autovaruna.profiler import timing
from autovaruna.profiler.parts import layer_parts
from autovaruna.profiler.profile import profile
from autovaruna.profiler.speed import measure_speed
from tests.catalogue import CASES
from tests.profiler.models import CPU, Mlp, traced


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts this process's own seconds alone, so that other processes matter less."""
    monkeypatch.setattr(timing, "perf_counter", process_time)


def plain_seconds(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> tuple[float, float]:
    """Returns the median seconds of plain forwards and backwards."""
    samples = []
    for _ in range(15):
        begin = process_time()
        output = model(*args, **kwargs)
        middle = process_time()
        getattr(output, "loss", output).backward()
        samples.append((middle - begin, process_time() - middle))
    forwards, backwards = zip(*samples[3:], strict=True)
    return median(forwards), median(backwards)


@pytest.mark.usefixtures("own_time")
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_blocks_add_up_to_the_model(name: str) -> None:
    """Forward and backward of all blocks together are within 40 % of the model's, one thread each."""
    model = Mlp(12, 256) if name == "mlp" else CASES["gpt2"].without_dropout().model()
    size = 16 if name == "mlp" else 128  # large enough that Python's share of the plain model is small
    args, kwargs = ((torch.randn(size, 256),), {}) if name == "mlp" else CASES["gpt2"].batch(size, 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tensors, call = describe(model, args, kwargs)
        costs = profile(trace(model, call, CPU), model, [size], CPU, iterations=9, inputs=tensors).costs[0]
        forward, backward = plain_seconds(model, *args, **kwargs)
    finally:
        torch.set_num_threads(threads)
    assert sum(cost.forward_seconds for cost in costs) == pytest.approx(forward, rel=0.4)
    assert sum(cost.backward_seconds for cost in costs) == pytest.approx(backward, rel=0.4)


@pytest.mark.usefixtures("own_time")
def test_twice_the_layers_take_twice_as_long() -> None:
    """The work grows with the depth although no more of it is measured."""
    totals = []
    for num_layers in (24, 48):
        model = Mlp(num_layers, 64)
        costs = profile(traced(model, torch.zeros(3, 64)), model, [32], CPU, iterations=9).costs[0]
        totals.append(sum(cost.forward_seconds + cost.backward_seconds for cost in costs))
    assert totals[1] / totals[0] == pytest.approx(2.0, rel=0.4)


def test_layers_hold_every_block_once() -> None:
    """Layers part the blocks, in order, and none is small but the last."""
    layers = layer_parts(traced(Mlp(40), torch.zeros(3, 16)))
    assert [block.index for layer in layers for block in layer.blocks] == list(
        range(len(layers[0].traced.graph.blocks))
    )
    assert all(len(layer.blocks) >= 12 for layer in layers[:-1])


def test_an_empty_call_costs_little() -> None:
    """What is subtracted from every measurement is microseconds."""
    forward, backward = timing.call_seconds(2, CPU)
    assert 0 < forward < 1e-4 and 0 < backward < 1e-3


def test_speed_is_repeatable() -> None:
    """The kernel that compares ranks takes a positive time, about the same each time."""
    first, second = measure_speed(CPU), measure_speed(CPU)
    assert 0.2 < first / second < 5
