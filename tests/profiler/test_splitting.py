"""What a profile says of weight gradients computed apart: their seconds, what that adds, and the bytes kept for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from autovaruna.errors import MeasureError
from autovaruna.profiler import time
from autovaruna.profiler.bytes import count_deferred_bytes
from autovaruna.profiler.cache import load_measured, save_measured
from autovaruna.profiler.records import Profile
from autovaruna.profiler.roofline import predict
from autovaruna.profiler.work import Part, Samples, block_parts, make_work
from tests.profiler.clock import work_clock
from tests.profiler.models import CPU, WIDTH, Mlp, profile, traced, traced_case
from tests.profiler.test_roofline import COMPUTE


def measured(model: nn.Module, size: int, *args: torch.Tensor) -> Profile:
    graph = traced(model, *args)
    found = profile(graph, model, [size], CPU, iterations=3)
    assert found.fingerprint == graph.graph.fingerprint
    return found


def test_half_of_the_arithmetic_of_a_linear_backward_is_the_weights() -> None:
    """The first layer, whose input needs no gradient, has nothing else."""
    model = Mlp(3)
    graph = traced(model, torch.zeros(5, WIDTH))
    costs = predict(graph, model, [8], COMPUTE).costs[0]
    linears = [cost for cost in costs if cost.weight_seconds > 0]
    product = 2 * 8 * WIDTH * WIDTH / 1e12
    assert [cost.weight_seconds for cost in linears] == pytest.approx([product] * 3)
    assert [cost.backward_seconds for cost in linears] == pytest.approx([product, 2 * product, 2 * product])


def test_measured_weight_gradients_are_half_of_the_backward_of_a_linear_layer() -> None:
    """The first layer, whose input needs no gradient, has nothing else."""
    model = Mlp(3, 256)
    graph = traced(model, torch.zeros(5, 256))
    with work_clock(time):
        costs = profile(graph, model, [64], CPU, iterations=2).costs[0]
    shares = [cost.weight_seconds / cost.backward_seconds for cost in costs if cost.weight_seconds > 0]
    assert shares == pytest.approx([1.0, 0.5, 0.5], rel=0.02)
    assert all(cost.weight_seconds <= cost.backward_seconds for cost in costs)
    assert all(cost.split_seconds == 0 for cost in costs if not cost.weight_seconds)


def test_splitting_an_operation_does_none_of_its_work_twice() -> None:
    """All that it takes is Python."""
    with work_clock(time):
        assert 0 <= time.split_seconds(CPU) < 1e-5
    assert time.split_seconds(CPU) >= 0


def test_what_is_kept_is_the_operand_and_the_gradient() -> None:
    costs = measured(Mlp(3), 8, torch.zeros(5, WIDTH)).costs[0]
    assert [cost.deferred_bytes for cost in costs if cost.weight_seconds > 0] == [2 * 8 * WIDTH * 4] * 3
    assert all(cost.deferred_bytes == 0 for cost in costs if not cost.weight_seconds)


def test_nothing_is_left_of_what_was_counted() -> None:
    """Counting leaves gradients of parameters as they were; a second count is the same."""
    model = Mlp(2)
    graph = traced(model, torch.zeros(5, WIDTH))
    part = next(part for part in block_parts(graph) if "linear" in part.name)
    work = make_work(part, Samples(graph, model, CPU), 4)
    assert count_deferred_bytes(work)[0] == count_deferred_bytes(work)[0] == 2 * 4 * WIDTH * 4


def test_a_file_keeps_them(tmp_path: Path) -> None:
    found = measured(Mlp(2), 4, torch.zeros(5, WIDTH))
    save_measured(tmp_path / "profile.json", found)
    assert load_measured(tmp_path / "profile.json", Profile) == found


@pytest.mark.parametrize("place", [0, -1])
def test_a_digit_that_has_changed_is_named(place: int, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_measured(path, measured(Mlp(2), 4, torch.zeros(5, WIDTH)))
    content = json.loads(path.read_text())
    content["costs"][0][place]["forward_seconds"] += 1e-9
    path.write_text(json.dumps(content, indent=2))
    with pytest.raises(MeasureError, match=r"is damaged: checksum is .*measure again"):
        load_measured(path, Profile)
    del content["checksum"]  # as a person does who means it
    path.write_text(json.dumps(content))
    assert load_measured(path, Profile).costs[0][place].forward_seconds == content["costs"][0][place]["forward_seconds"]


@pytest.mark.parametrize(("name", "most"), [("conv_net", 1.0), ("gpt2", 1.0), ("bert", 1.25)])
def test_blocks_add_up_to_what_a_stage_defers(name: str, most: float) -> None:
    """An operand that several blocks share is counted by each of them: a stage may begin between them."""
    model, graph, tensors = traced_case(name, 4)
    samples = Samples(graph, model, CPU, tensors)
    nodes = tuple(n for n in graph.nodes if n in graph.block_of or n in graph.repeated)
    whole, _ = count_deferred_bytes(make_work(Part(graph, graph.graph.blocks, nodes, "whole"), samples, 4))
    works = [make_work(part, samples, 4) for part in block_parts(graph)]
    assert 1.0 <= sum(count_deferred_bytes(work)[0] for work in works if work.split) / whole <= most
