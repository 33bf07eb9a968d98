"""Holds that the seconds of blocks add up to what the whole model takes, on a clock of work."""

from __future__ import annotations

import pytest
import torch

from autovaruna.graph.call import describe
from autovaruna.graph.trace import trace
from autovaruna.profiler import time
from autovaruna.profiler.time import measure_pace
from autovaruna.profiler.work import layer_parts
from tests.catalogue import CASES
from tests.profiler.clock import TICK_SECONDS, plain_seconds, work_clock
from tests.profiler.models import CPU, Mlp, profile, traced


@pytest.mark.parametrize("name", ["gpt2", "conv_net", "lstm", "three_users", "tied", "returned_scores"])
def test_blocks_add_up_to_the_model(name: str) -> None:
    """Forward and backward of all blocks together are the model's, but for casts, views and sums of gradients."""
    case = CASES[name].without_dropout()
    model, (args, kwargs) = case.model(), case.batch(16, 0)
    tensors, call = describe(model, args, kwargs)
    graph = trace(model, call, CPU)
    with work_clock(time) as clock:
        costs = profile(graph, model, [16], CPU, iterations=2, inputs=tensors).costs[0]
        forward, backward = plain_seconds(clock, lambda: case.loss_of(model(*args, **kwargs), (args, kwargs)))
    assert sum(cost.forward_seconds for cost in costs) == pytest.approx(forward, rel=0.02)
    assert sum(cost.backward_seconds for cost in costs) == pytest.approx(backward, rel=0.02)


def test_twice_the_layers_take_twice_as_long() -> None:
    """The work grows with the depth although no more of it is measured."""
    totals = []
    for num_layers in (24, 48):
        model = Mlp(num_layers, 64)
        graph = traced(model, torch.zeros(3, 64))
        with work_clock(time):
            costs = profile(graph, model, [32], CPU, iterations=2).costs[0]
        totals.append(sum(cost.forward_seconds + cost.backward_seconds for cost in costs))
    assert totals[1] / totals[0] == pytest.approx(2.0, rel=0.02)


def test_layers_hold_every_block_once() -> None:
    """Layers part the blocks, in order, and none is small but the last."""
    layers = layer_parts(traced(Mlp(40), torch.zeros(3, 16)))
    assert [block.index for layer in layers for block in layer.blocks] == list(
        range(len(layers[0].traced.graph.blocks))
    )
    assert all(len(layer.blocks) >= 12 for layer in layers[:-1])


def test_an_empty_call_costs_little() -> None:
    """What is subtracted from every measurement is the work of an operation or two, and never less than nothing."""
    with work_clock(time):
        forward, backward = time.call_seconds(2, CPU)
    assert 0 <= forward < 1e-5 and 0 <= backward < 1e-5
    assert all(seconds > 0 for seconds in time.call_seconds(2, CPU))


def test_speed_is_that_of_a_fixed_kernel() -> None:
    """Two products and two passes over their results, each time."""
    with work_clock(time):
        pace = measure_pace(CPU)
    assert pace.typical == pytest.approx(pace.mean) == pytest.approx(TICK_SECONDS * 2 * (256**3 + 2 * 256**2))
    assert measure_pace(CPU).typical > 0
