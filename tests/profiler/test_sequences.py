"""What a part takes and gives back, one after the other: as torch's own kernels do, and on the planner's heap."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autovaruna.errors import MeasureError
from autovaruna.graph.records import Graph
from autovaruna.planner.costs import CostTable
from autovaruna.planner.memory.holes import heap_of_steps
from autovaruna.planner.memory.stage_tensors import tensors_of_stage
from autovaruna.profiler.parts import block_parts
from autovaruna.profiler.profile import profile
from autovaruna.profiler.profile_file import load_profile, save_profile
from autovaruna.profiler.records import NOT_RECORDED, Profile, Sequences
from autovaruna.profiler.samples import Samples
from autovaruna.profiler.sequences import record_sequences
from autovaruna.profiler.work import Work, make_work
from autovaruna.schedule import Instruction, Kind
from tests.profiler.models import CPU, WIDTH, Mlp, traced, traced_case

SIZE = 5
ACTIVATION, MATRIX, BIAS = SIZE * WIDTH * 4, WIDTH * WIDTH * 4, WIDTH * 4


def linear() -> Work:
    """A linear layer in the middle of a model."""
    model = Mlp(3)
    graph = traced(model, torch.zeros(SIZE, WIDTH))
    part = [part for part in block_parts(graph) if "linear" in part.name][1]
    work = make_work(part, Samples(graph, model, CPU), SIZE)
    work.backward(work.forward())
    return work


def left(steps: tuple[int, ...], more: tuple[int, ...] = ()) -> list[int]:
    """Returns the bytes of what is taken and not given back."""
    taken = [step for step in steps + more if step > 0]
    for step in steps + more:
        if step < 0:
            assert taken[-step - 1] > 0, "given back twice"
            taken[-step - 1] = 0
    return sorted(each for each in taken if each)


def test_a_linear_layer_leaves_its_output_and_then_its_gradients() -> None:
    found = record_sequences(linear(), CPU)
    assert left(found.forward) == [ACTIVATION]
    assert left(found.forward, found.backward) == sorted([ACTIVATION, ACTIVATION, MATRIX, BIAS])


def test_recording_leaves_gradients_as_they_were() -> None:
    work = linear()
    leaves = [each for each in work.arguments if isinstance(each, torch.Tensor) and each.requires_grad]
    before = [leaf.grad for leaf in leaves]
    assert record_sequences(work, CPU) == record_sequences(work, CPU)
    assert all(leaf.grad is gradient for leaf, gradient in zip(leaves, before, strict=True))


class Convolutions(nn.Module):
    """Convolutions whose kernels copy what they read and write into another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()


def convolutions() -> tuple[Profile, CostTable, Graph]:
    model, x = Convolutions(), torch.randn(4, 16, 24, 24)
    graph = traced(model, x)
    found = profile(graph, model, [2, 4], CPU, iterations=1, budget_seconds=0.0)
    return found, CostTable(found), graph.graph


def test_what_kernels_take_for_themselves_is_there() -> None:
    """More is live while a convolution runs than it leaves, by its own kernel's copies."""
    found, _, _ = convolutions()
    sequences = next(cost.sequences for cost in found.costs[1] if len(cost.sequences.forward) > 2)
    taken = [step for step in sequences.forward if step > 0]
    live = list(accumulate(step if step > 0 else -taken[-step - 1] for step in sequences.forward))
    assert max(live) > live[-1] > 0


@pytest.mark.parametrize("name", ["chain", "dropout", "conv_net", "lstm", "tied", "skip", "batch_norm"])
def test_a_step_gives_back_what_was_recorded(name: str) -> None:
    """On the heap nothing is left of a step, and what it holds at most is near what the blocks keep."""
    model, graph, tensors = traced_case(name, 4)
    costs = CostTable(profile(graph, model, [2, 4], CPU, iterations=1, inputs=tensors, budget_seconds=0.0)).at(3)
    stage = tensors_of_stage(graph.graph, costs, range(len(graph.graph.blocks)))
    assert any(block.steps is not None for block in stage.blocks)
    kinds = (Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD, 0), (Kind.BACKWARD, 1)
    heap = heap_of_steps([Instruction(0, kind, k) for kind, k in kinds], {0: stage}, 0.0, 0.0)
    assert heap.live_bytes == 0
    assert heap.peak_bytes >= 0.9 * costs.saved_bytes.sum()


class Joined(nn.Module):
    """Joins what two layers make, as networks with skips do: each gets a slice of the gradient, which has holes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.first(x)
        return self.last(torch.cat([self.second(torch.relu(one)), one], 1)).square().mean()


def test_slices_of_a_gradient_are_seen_to_lie_in_it_with_holes() -> None:
    model, x = Joined(), torch.randn(SIZE, WIDTH)
    graph = traced(model, x)
    found = profile(graph, model, [2, SIZE], CPU, iterations=1, budget_seconds=0.0)
    (joining,) = (block.index for block in graph.graph.blocks if any("cat" in name for name in block.nodes))
    span = (SIZE - 1) * 2 * ACTIVATION // SIZE + ACTIVATION // SIZE
    assert found.costs[1][joining].sequences.read == (-1, -1)
    assert found.costs[1][joining].sequences.spans == (span, span)
    (skipping,) = (v for v, value in enumerate(graph.graph.values) if len(value.consumers) == 2)
    costs = CostTable(found).at(SIZE)
    (inner,) = (v for v, each in enumerate(graph.graph.values) if each.consumers == (joining,))
    front = tensors_of_stage(graph.graph, costs, range(joining))
    assert front.gradients_received.keys() == {skipping, inner}
    assert front.gradient_spans == {skipping: span, inner: span}


def test_a_file_has_each_sequence_once(tmp_path: Path) -> None:
    found, _, _ = convolutions()
    save_profile(tmp_path / "profile.json", found)
    assert load_profile(tmp_path / "profile.json") == found
    for table, costs in zip(json.loads((tmp_path / "profile.json").read_text())["costs"], found.costs, strict=True):
        distinct = {cost.sequences for cost in costs}
        assert len(table["sequences"]["distinct"]) == len(distinct) < len(costs)


@pytest.mark.parametrize(
    ("forward", "more"),
    [
        *(([0], {}), ([1.5], {}), ([8, -2], {}), (["many"], {})),
        *(([8], {"read": [2], "spans": [0]}), ([8], {"read": [1]}), ([8], {"read": ["1"], "spans": [0]})),
    ],
)
def test_a_file_with_other_steps_is_refused(forward: list[object], more: dict[str, object], tmp_path: Path) -> None:
    found, _, _ = convolutions()
    save_profile(tmp_path / "profile.json", found)
    content = json.loads((tmp_path / "profile.json").read_text())
    del content["checksum"]
    content["costs"][0]["sequences"]["distinct"][0] = {"forward": forward, "backward": [], **more}
    (tmp_path / "profile.json").write_text(json.dumps(content))
    with pytest.raises(MeasureError, match="sequences"):
        load_profile(tmp_path / "profile.json")


def test_nothing_is_recorded_while_the_script_is_profiled() -> None:
    with torch.profiler.profile(profile_memory=True):
        assert record_sequences(linear(), CPU) == Sequences()


def test_what_cannot_tell_its_gradients_is_not_recorded() -> None:
    """Checkpointed in the reentrant way, it goes backward, but refuses `torch.autograd.grad`."""
    work = linear()
    again = replace(work, run=lambda *args: checkpoint(work.run, *args, use_reentrant=True))
    again.backward(again.forward())
    assert record_sequences(again, CPU) == NOT_RECORDED
