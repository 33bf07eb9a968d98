"""Bytes of a part: what is saved, and what is allocated while it runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autovaruna.profiler import bytes
from autovaruna.profiler.bytes import count_bytes
from autovaruna.profiler.work import MeasuredPart, Samples, make_work
from tests.products import some
from tests.profiler.models import CPU, WIDTH, Mlp, profile, traced, traced_case


def saved_by_torch(model: nn.Module, *args: Tensor) -> int:
    """Returns the bytes that autograd keeps in a plain call, without parameters and inputs."""
    others = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *args)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*args)
    del loss
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in others)


def test_an_mlp_saves_what_torch_saves() -> None:
    """The sum over blocks is exact: each relu is kept once, though relu and the next linear both save it."""
    model, x = Mlp(5), torch.randn(6, WIDTH)
    costs = profile(traced(model, x), model, [6]).costs[0]
    assert sum(cost.saved_bytes for cost in costs) == saved_by_torch(model, x) == 5 * 6 * WIDTH * 4


WITH_MASKS = ["bert", "mixtral"]
NAMES = some(["chain", "dropout", "conv_net", "lstm", "tied", "skip", "batch_norm", "gpt2"], 4) + some(WITH_MASKS, 1)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_add_up_to_the_whole(name: str) -> None:
    """What all blocks keep is what the model keeps as one stage, views and shared values included.

    Of repeated operations (masks) each block counts what it keeps: a little too much is safe, too little is not.
    """
    model, graph, tensors = traced_case(name, 4)
    costs = profile(graph, model, [4], inputs=tensors, budget_seconds=0.0).costs[0]
    nodes = tuple(n for n in graph.nodes if n in graph.block_of or n in graph.repeated)
    whole = MeasuredPart(graph, graph.graph.blocks, nodes, "whole")
    counted = count_bytes(make_work(whole, Samples(graph, model, CPU, tensors), 4), CPU)
    kept = counted.inside + sum(made.num_bytes for made in counted.made if made.is_saved)
    assert kept <= sum(cost.saved_bytes for cost in costs) <= kept * (1.05 if name in WITH_MASKS else 1.0)


def test_work_of_a_linear() -> None:
    """A linear's backward needs the gradient that comes in, the one it passes on, and its weight's.

    What it has made is gone by then: the relu behind it keeps its own result.
    """
    model = Mlp(3)
    graph = traced(model, torch.zeros(5, WIDTH))
    block = next(block for block in graph.graph.blocks if block.name == "layers.1/linear_1")
    cost = profile(graph, model, [8]).costs[0][block.index]
    batch, weight = 8 * WIDTH * 4, WIDTH * WIDTH * 4
    assert 2 * batch + weight <= cost.work_bytes < 3 * batch + weight


NUM_BYTES = 1 << 20


def test_memory_of_a_kernel_counts() -> None:
    """An index of 32 bits is made one of 64 inside the operation, which returns one number."""
    numbers, places = torch.ones(8), torch.zeros(NUM_BYTES, dtype=torch.int32)
    known = [numbers, places]
    with bytes.meter_of(torch.device("cpu"), known) as meter:
        numbers.index_select(0, places).sum()
        peak = meter.restart()
    with bytes._OperationMeter(set()) as seen:
        torch.ones(8).sum()
        operations = seen.restart()
    assert peak >= 4 * NUM_BYTES > operations


def test_a_script_that_is_profiled_stays_so() -> None:
    with torch.profiler.profile() as profiler:
        with bytes.meter_of(torch.device("cpu"), []) as meter:
            kept = torch.ones(NUM_BYTES, dtype=torch.uint8)
            assert meter.restart() == NUM_BYTES
        del kept
        torch.ones(3).exp()
    assert any(event.key == "aten::exp" for event in profiler.key_averages())
