"""Measuring: seconds of parts and layers, and the clock of a rank's own time."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from autovaruna.errors import MeasureError
from autovaruna.graph.call import describe
from autovaruna.graph.trace import trace
from autovaruna.profiler import measure as clocks
from autovaruna.profiler.cache import load_measured, save_measured
from autovaruna.profiler.measure import measure, measure_pace, merge, own_clock, to_profile
from autovaruna.profiler.records import Profile
from autovaruna.profiler.work import block_parts
from tests.catalogue import CASES
from tests.catalogue.small import Written
from tests.products import some
from tests.profiler.clock import plain_seconds, work_clock
from tests.profiler.models import CPU, WIDTH, Mlp, on_cpu, profile, traced, traced_case


def test_identical_blocks_are_measured_once() -> None:
    """Ten equal layers cost as many measurements as five."""
    few, many = (len(measure(traced(m := Mlp(n), torch.zeros(3, WIDTH)), m, [2], CPU)) for n in (30, 60))
    assert few == many
    model = traced(Mlp(60), torch.zeros(3, WIDTH))
    assert len({part.signature for part in block_parts(model)}) < 6 < len(model.graph.blocks)


def test_a_block_that_raises_is_named() -> None:
    """A failed measurement is an error that says block, module, size and reason; it is never filled in."""
    solve = lambda self, x: torch.linalg.solve(self.matrix, self.inner(x)).sum()  # noqa: E731
    model = Written(solve, inner=nn.Linear(4, 4), matrix=torch.zeros(4, 4))  # which has no inverse
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


def test_a_model_on_meta_is_measured_and_without_gradients_there_is_no_backward() -> None:
    """No rank needs to hold the model; traced under no_grad it has backward 0, saves nothing, and still takes time."""
    with torch.device("meta"):
        model = Mlp(3)
    for needs_gradient in (True, False):
        with torch.set_grad_enabled(needs_gradient):
            graph = traced(model, torch.zeros(3, WIDTH))
        costs = profile(graph, model, [2]).costs[0]
        assert all(cost.forward_seconds > 0 for cost in costs)
        assert any(cost.backward_seconds or cost.saved_bytes for cost in costs) == needs_gradient


@pytest.mark.parametrize("name", some(["gpt2", "conv_net", "lstm", "three_users", "tied", "returned_scores"], 3))
def test_blocks_add_up_to_the_model(name: str) -> None:
    """Forward and backward of all blocks together are the model's, but for casts, views and sums of gradients."""
    case = CASES[name].without_dropout()
    model, (args, kwargs) = on_cpu(case, 16)
    tensors, call = describe(model, args, kwargs)
    graph = trace(model, call, CPU)
    with work_clock(clocks) as clock:
        costs = profile(graph, model, [16], iterations=2, inputs=tensors).costs[0]
        forward, backward = plain_seconds(clock, lambda: case.loss_of(model(*args, **kwargs), (args, kwargs)))
    assert sum(cost.forward_seconds for cost in costs) == pytest.approx(forward, rel=0.02)
    assert sum(cost.backward_seconds for cost in costs) == pytest.approx(backward, rel=0.02)


def test_a_digit_that_has_changed_is_named(tmp_path: Path) -> None:
    path, model = tmp_path / "profile.json", Mlp(2)
    save_measured(path, profile(traced(model, torch.zeros(5, WIDTH)), model, [4]))
    content = json.loads(path.read_text())
    content["costs"][0][-1]["forward_seconds"] += 1e-9
    path.write_text(json.dumps(content, indent=2))
    with pytest.raises(MeasureError, match=r"is damaged: checksum is .*measure again"):
        load_measured(path, Profile)
    del content["checksum"]  # as a person does who means it
    path.write_text(json.dumps(content))
    assert load_measured(path, Profile).costs[0][-1].forward_seconds == content["costs"][0][-1]["forward_seconds"]


pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system that pins to cores")


@pytest.fixture
def one_core() -> Iterator[None]:
    """Runs a test with one thread on one core."""
    cores, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {min(cores)})
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    os.sched_setaffinity(0, cores)


@contextmanager
def other_programs(count: int) -> Iterator[None]:
    """Has programs that never rest share the core of this one."""
    busy = "import sys\nprint(flush=True)\nwhile True: pass"
    programs = [subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()
        yield
    finally:
        for program in programs:
            program.kill()
            program.communicate(timeout=20)


@pytest.mark.usefixtures("one_core")
def test_own_time_has_no_turns_of_other_programs_and_pace_tells_what_they_take() -> None:
    """A block that takes longer than a turn would have some in every sample; two others leave a third of the core."""
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh())
    graph = traced(model, torch.zeros(3, 1000))

    def seconds() -> float:
        costs = profile(graph, model, [300], iterations=2).costs[0]
        return sum(cost.forward_seconds + cost.backward_seconds for cost in costs)

    found = []
    for _ in range(3):
        alone, pace = seconds(), measure_pace(CPU)
        with other_programs(2):
            ratio, beside = seconds() / alone, measure_pace(CPU)
        found.append((ratio, beside.typical / pace.typical, beside.mean / beside.typical))
        if max(found[-1][:2]) < 1.6 and found[-1][2] > 1.8:
            return
    pytest.fail(f"own time of blocks and of the kernel changed, and the core was shared, by {found}")


def test_clock_that_counts_turns_alone_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the time of one thread where several compute."""
    readings = iter(0.01 * (count // 7) for count in range(10_000))
    clocks._is_fine.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(clocks, "thread_time", lambda: next(readings))
        assert own_clock(CPU) is clocks.perf_counter
    clocks._is_fine.cache_clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert own_clock(CPU) is clocks.perf_counter
