"""The first call: evaluation before training, what is compared and measured, and by whom."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autovaruna import AutoVaruna, InputError, TraceError, log
from autovaruna.config.settings import Settings
from autovaruna.elastic.job_folder import VARIABLE, JobPlace, job_place
from autovaruna.errors import ConfigError
from autovaruna.graph.module_state import fake_like
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from autovaruna.profiler import measure
from autovaruna.profiler.bytes import Bytes
from autovaruna.profiler.measure import Key, Pace, PartCost
from autovaruna.runtime.environment import LOCAL_RANK_VARIABLES
from autovaruna.runtime.world import World
from autovaruna.session import measuring, traces
from autovaruna.session.measuring import SpeedWatch, Turn, measure_together, persistent_speeds
from autovaruna.session.model import find_device, move_to_own_device, on_own_gpu
from tests.catalogue import CASES
from tests.catalogue.small import Written
from tests.profiler.models import WIDTH, Mlp
from tests.ranks import run_ranks
from tests.reference import sgd
from tests.session.training import QUIET, Setup, descend, on_ranks, pipeline

FAST = {**QUIET, "profile_iterations": 1}


def scores_or_loss(self: Any, x: Tensor, y: Tensor | None = None) -> Tensor:
    """Returns scores, or a loss where there are labels."""
    scores: Tensor = self.last(self.norm(torch.relu(self.first(x))))
    return scores if y is None else F.cross_entropy(scores, y)


def make_net() -> Any:
    return Written(scores_or_loss, first=nn.Linear(8, 16), norm=nn.BatchNorm1d(16), last=nn.Linear(16, 4))


@pytest.mark.parametrize("verbosity", ["none", "short", "full"])
def test_a_newcomer_reads_at_most_eight_lines_of_a_first_step(
    verbosity: str, caplog: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    """Also where each phase takes long: one line of each, and two of the plan. None, or the whole table, if asked."""
    monkeypatch.setattr(log, "_LONG_SECONDS", 0.0)
    net, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 8)
    options = {"deployment_file": str(tmp_path / "plan.json"), "num_micro_batches": 2, "verbosity": verbosity}
    model = AutoVaruna(net, torch.optim.SGD(net.parameters(), lr=0.1), **options)
    model(x).square().mean().backward()
    told = "\n".join(each.getMessage() for each in caplog.records if each.name.startswith("autovaruna"))
    phases = ["tracing", "trying", "measuring", "planning", "splitting"]
    if verbosity == "none":
        assert not told
        return
    assert [line.split()[0] for line in told.splitlines() if line.endswith(" ...")] == phases
    assert f"the plan, saved to {tmp_path / 'plan.json'}: 1 stage, " in told
    assert ("proven bound" in told) == (verbosity == "full")
    assert len(told.splitlines()) <= 8 or verbosity == "full"


def test_evaluating_first_changes_nothing():
    net, x, y = make_net(), torch.randn(8, 8), torch.arange(8) % 4

    def train(evaluates_first: bool) -> list[float]:
        own = copy.deepcopy(net)
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.1)
        model = AutoVaruna(own, optimizer, num_stages=2, num_micro_batches=2, inputs="replicated", **FAST)
        if evaluates_first:
            model.eval()
            with torch.no_grad():
                assert torch.equal(model(x), copy.deepcopy(net).eval()(x))
            assert not own.norm.training
            model.train()
        losses = []
        for _ in range(3):
            losses.append(model(x, y))
            descend(losses[-1], optimizer)
        return [loss.item() for loss in losses]

    first, other = (run_ranks(2, lambda world, way=way: train(way)) for way in (False, True))
    assert first[0][-1] < first[0][0]
    assert first == other


def test_a_plan_for_evaluation_alone_refuses_to_train():
    model = AutoVaruna(make_net(), num_micro_batches=2, **FAST)
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    with torch.no_grad():
        model(x)
    with pytest.raises(InputError, match="planned for evaluation"):
        model(x, y)


def encode(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Has an encoder that is not trained."""
    with torch.no_grad():
        features = self.encoder(x)
    return F.cross_entropy(self.last(torch.relu(self.first(features))), y)


def test_what_no_gradient_goes_through_is_measured_as_it_runs() -> None:
    """Once its code was older than its graph until a copy was made: two names of one part, and a KeyError."""
    encoder = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    net = Written(encode, encoder=encoder, first=nn.Linear(8, 16), last=nn.Linear(16, 4))
    x, y = torch.randn(8, 8), torch.arange(8) % 4

    def be_rank(world: World) -> float:
        settings = {**QUIET, "profile_iterations": 2, "num_stages": 2, "inputs": "replicated"}
        loss = AutoVaruna(copy.deepcopy(net), **settings)(x, y)
        loss.backward()
        return loss.item()

    assert run_ranks(2, be_rank) == pytest.approx([net(x, y).item()] * 2)


CASE = CASES["chain"]


def trace_wrongly(*args: Any, **kwargs: Any) -> TracedModel:
    """Returns a trace that has lost its last bias."""
    found = trace(*args, **kwargs)
    node = found.module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[-1]
    node.args = node.args[:2]
    return found


def call(**settings: Any) -> list[Any]:
    """Returns what two ranks get of a first call: a loss, or an error."""
    args, kwargs = CASE.batch(6, 0)

    def be_rank(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Any:
        try:
            return CASE.loss_of(model(*args, **kwargs), (args, kwargs)).item()
        except TraceError as error:
            return str(error)

    setup = Setup(pipeline(2).stage_ranks, settings=settings)
    return on_ranks(setup, CASE.model(), be_rank, sgd)


def test_all_ranks_hear_of_a_difference_unless_that_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "trace", trace_wrongly)
    first, second = call()
    assert "computes something else than the model itself" in first
    assert second.startswith("rank 0 failed while comparing the trace with the model")
    assert all(isinstance(each, float) for each in call(check_trace=False))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Counts what is measured, by part and micro-batch size, on all ranks together."""
    counted: Counter[tuple[str, int]] = Counter()
    measure_one = measure.measure_one

    def counting(part: Any, samples: Any, size: int, *rest: Any) -> Any:
        counted[part.signature, size] += 1
        return measure_one(part, samples, size, *rest)

    monkeypatch.setattr(measure, "measure_one", counting)
    return counted


def first_call(num_layers: int, **settings: Any) -> None:
    model = AutoVaruna(Mlp(num_layers), inputs="replicated", num_micro_batches=2, **FAST, **settings)
    model(torch.zeros(4, WIDTH)).backward()


def test_a_second_run_measures_nothing(measured: Counter[tuple[str, int]]) -> None:
    run_ranks(2, lambda world: first_call(8, num_stages=2))
    assert measured and set(measured.values()) == {1}
    measured.clear()
    run_ranks(2, lambda world: first_call(8, num_stages=2))
    assert not measured
    run_ranks(2, lambda world: first_call(8, num_stages=2, profile_cache=False))
    assert set(measured.values()) == {1}


PARTS = "abcde"


def cost(seconds: float) -> PartCost:
    return PartCost(seconds, 2 * seconds, Bytes(0, (), (), 0, 0))


@pytest.mark.parametrize(
    ("looks", "speeds"),
    [
        ([[1, 1 / 2], [1, 1], [1, 1]], (1, 1)),
        ([[1, 1 / 2], [1, 2], [1, 1 / 2]], (1, 1)),
        ([[1, 0.85], [1, 0.85], [1, 0.85]], (1, 1)),
        ([[1, 1 / 2, 1], [1, 1 / 3, 1], [1, 0.4, 1]], (1, 0.4, 1)),
        ([[1, 1, 2], [1, 1, 2], [1, 1, 3]], (1, 1, 2)),
        ([[0.5, 0.6, 0.55], [0.5, 0.45, 0.5], [0.5, 0.6, 0.4]], (0.5, 0.5, 0.5)),
    ],
    ids=["slow once", "slow in turn", "noise", "slow", "fast", "all slow"],
)
def test_a_rank_differs_if_it_does_at_every_look(looks: list[list[float]], speeds: tuple[float, ...]) -> None:
    assert persistent_speeds(looks) == pytest.approx(speeds)


@pytest.mark.parametrize(
    ("factors", "speeds"), [((1.0, 1.15), (1.0, 1 / 1.15)), ((), (1.0, 1.0)), ((1.2,), (1.0, 1.0))]
)
def test_a_rank_whose_steps_were_slow_is_planned_for(
    factors: tuple[float, ...], speeds: tuple[float, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A manager has seen its steps; what it says of another number of ranks does not count."""
    monkeypatch.setenv(VARIABLE, json.dumps(asdict(JobPlace(str(tmp_path), 1, factors=factors))))
    monkeypatch.setattr("autovaruna.session.measuring.measure_pace", lambda device: Pace(1, 1))

    def run(world: World) -> tuple[float, ...]:
        watch = SpeedWatch(world, torch.device("cpu"))
        watch.sample()
        return watch.speeds()

    assert job_place() == JobPlace(str(tmp_path), 1, factors=factors)
    assert run_ranks(2, run) == [speeds, speeds]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_every_part_is_measured_on_two_ranks(num_ranks: int, iterations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 takes three times as long, and one turn in which all take ten times as long is not seen."""
    monkeypatch.setattr(
        SpeedWatch, "speeds_of_samples", lambda watch: tuple(1 / 3 if rank == 1 else 1.0 for rank in range(num_ranks))
    )
    measured: list[tuple[str, int]] = []

    def run(world: World) -> dict[Key, PartCost]:
        def measure_own(turn: Turn) -> dict[Key, PartCost]:
            first, step = turn.share
            mine = PARTS[first::step]
            measured.extend((name, world.rank) for name in mine)
            factor = (3 if world.rank == 1 else 1) * (10 if turn.place else 1)
            return {(name, 4): cost(factor * (1 + PARTS.index(name))) for name in mine}

        return measure_together(SpeedWatch(world, torch.device("cpu")), iterations, measure_own)

    num_turns = min(iterations, measuring.MOST_TURNS)
    for found in run_ranks(num_ranks, run):
        assert {name: each.forward_seconds for (name, _), each in found.items()} == pytest.approx(
            {name: 1 + place for place, name in enumerate(PARTS)}
        )
    assert len(set(measured)) == len(PARTS) * min(num_turns, num_ranks) and len(measured) == len(PARTS) * num_turns


CPU, META = torch.device("cpu"), torch.device("meta")


def gpu(number: int) -> torch.device:
    return torch.device("cuda", number)


def said_to_be_on(*devices: torch.device) -> nn.Module:
    """Returns a model with one parameter on each device, without any such device."""
    model = nn.Module()
    mode = FakeTensorMode()
    for number, device in enumerate(devices):
        tensor = torch.zeros(2, device="meta") if device == META else fake_like(torch.zeros(2), mode, device)
        model.register_parameter(f"p{number}", nn.Parameter(tensor))
    return model


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Lets torch say that there are four GPUs, and notes which one is current."""
    if torch.version.cuda and (torch.cuda.is_available() or torch.__version__ < "2.12"):
        pytest.skip("fake tensors ask the driver for the GPU")
    state = SimpleNamespace(current=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(state, "current", device.index))
    for name in LOCAL_RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return state


@pytest.mark.parametrize(
    "devices, setting, local_rank, current, expected",
    [
        ((CPU,), "auto", 3, 0, CPU),
        ((), "auto", 3, 0, CPU),
        ((META,), "auto", 3, 0, gpu(3)),
        ((META,), "auto", 5, 0, gpu(1)),  # more ranks than GPUs
        ((META,), "auto", None, 0, gpu(0)),  # no launcher
        ((META,), "auto", 3, 2, gpu(2)),  # the script has chosen
        ((gpu(0),), "auto", 3, 0, gpu(3)),
        ((gpu(0), META), "auto", 1, 0, gpu(1)),
        ((gpu(0),), "auto", 3, 2, gpu(2)),
        ((gpu(2),), "auto", 3, 0, gpu(2)),
        ((gpu(0), gpu(1)), "auto", 3, 0, gpu(0)),  # a model over several devices stays as it is
        ((CPU,), "cuda", 3, 0, gpu(3)),
        ((gpu(0),), "cpu", 3, 0, CPU),
    ],
)
def test_a_rank_computes_on_a_device_of_its_own(
    devices: tuple[torch.device, ...],
    setting: str,
    local_rank: int | None,
    current: int,
    expected: torch.device,
    four_gpus: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four_gpus.current = current
    if local_rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(local_rank))
    assert find_device(said_to_be_on(*devices), Settings(device=setting)) == expected


class Moved(nn.Module):
    """Notes where it is moved: tensors cannot go to GPUs that are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = said_to_be_on(gpu(0)).p0
        self.places: list[Any] = []

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.places.append(fn(SimpleNamespace(is_meta=False, to=lambda device: device)))
        return self


def test_a_model_on_the_first_gpu_goes_to_the_own_one_which_becomes_current(
    four_gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_LOCALID", "2")
    model = Moved()
    assert move_to_own_device(model, None, Settings()) == gpu(2)
    assert model.places == [gpu(2)] and four_gpus.current == 2


def test_inputs_go_to_the_own_gpu_from_others_alone() -> None:
    here, there = torch.zeros(1), SimpleNamespace(is_cuda=True, device=gpu(0), to=lambda device: device)
    tensors: list[Any] = [here, there]
    assert on_own_gpu(tensors, CPU) is tensors
    assert on_own_gpu(tensors, gpu(1)) == [here, gpu(1)]


@pytest.mark.parametrize("name", ["nowhere", "cuda" if not torch.cuda.is_available() else "cuda:999"])
def test_a_device_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{name}', which cannot be used here: .* Expected auto, cpu"):
        AutoVaruna(nn.Linear(2, 2), device=name)
