"""Holds that the bytes of blocks add up to what a whole stage keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph.traced import TracedModel
from autovaruna.profiler.bytes import Bytes, count_bytes
from autovaruna.profiler.work import Part, Samples, make_work
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


def whole(traced_model: TracedModel, model: nn.Module, tensors: list[Tensor], size: int) -> Bytes:
    """Measures all blocks, and the repeated operations, as one."""
    nodes = tuple(n for n in traced_model.nodes if n in traced_model.block_of or n in traced_model.repeated)
    part = Part(traced_model, traced_model.graph.blocks, nodes, "whole")
    return count_bytes(make_work(part, Samples(traced_model, model, CPU, tensors), size), CPU)


def test_an_mlp_saves_what_torch_saves() -> None:
    """The sum over blocks is exact: each relu is kept once, though relu and the next linear both save it."""
    model, x = Mlp(5), torch.randn(6, WIDTH)
    costs = profile(traced(model, x), model, [6], CPU).costs[0]
    assert sum(cost.saved_bytes for cost in costs) == saved_by_torch(model, x) == 5 * 6 * WIDTH * 4


@pytest.mark.parametrize("name", ["chain", "dropout", "conv_net", "lstm", "tied", "skip", "batch_norm", "gpt2"])
def test_blocks_add_up_to_the_whole(name: str) -> None:
    """What all blocks keep is what the model keeps as one stage, views and shared values included."""
    model, graph, tensors = traced_case(name, 4)
    costs = profile(graph, model, [4], CPU, inputs=tensors, budget_seconds=0.0).costs[0]
    counted = whole(graph, model, tensors, 4)
    kept = counted.inside + sum(made.num_bytes for made in counted.made if made.is_saved)
    assert sum(cost.saved_bytes for cost in costs) == kept


@pytest.mark.parametrize("name", ["bert", "mixtral"])
def test_masks_are_counted_by_each_who_keeps_them(name: str) -> None:
    """Of repeated operations each block counts what it keeps: a little too much is safe, too little is not."""
    model, graph, tensors = traced_case(name, 4)
    costs = profile(graph, model, [4], CPU, inputs=tensors, budget_seconds=0.0).costs[0]
    counted = whole(graph, model, tensors, 4)
    kept = counted.inside + sum(made.num_bytes for made in counted.made if made.is_saved)
    assert kept <= sum(cost.saved_bytes for cost in costs) <= 1.05 * kept


def test_work_of_a_linear() -> None:
    """A linear's backward needs the gradient that comes in, the one it passes on, and its weight's.

    What it has made is gone by then: the relu behind it keeps its own result.
    """
    model = Mlp(3)
    graph = traced(model, torch.zeros(5, WIDTH))
    block = next(block for block in graph.graph.blocks if block.name == "layers.1/linear_1")
    cost = profile(graph, model, [8], CPU).costs[0][block.index]
    batch, weight = 8 * WIDTH * 4, WIDTH * WIDTH * 4
    assert 2 * batch + weight <= cost.work_bytes < 3 * batch + weight


def test_saved_bytes_grow_with_the_micro_batch() -> None:
    """Twice the samples keep twice the bytes."""
    model = Mlp(3)
    graph = traced(model, torch.zeros(5, WIDTH))
    small, large = profile(graph, model, [8, 16], CPU).costs
    assert sum(cost.saved_bytes for cost in large) == 2 * sum(cost.saved_bytes for cost in small)
