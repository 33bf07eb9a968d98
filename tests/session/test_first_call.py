"""The first call: evaluation before training, what is compared and measured, and by whom."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import asdict
from functools import partial
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
from autovaruna.ranks.environment import LOCAL_RANK_VARIABLES
from autovaruna.ranks.world import World
from autovaruna.session import measuring, preparation, traces
from autovaruna.session.measuring import MeasuredModel, SpeedWatch, persistent_speeds
from autovaruna.session.model import find_device, move_to_own_device, on_own_gpu
from tests.catalogue import CASES
from tests.catalogue.small import Written
from tests.profiler.models import WIDTH, Mlp
from tests.rank_threads import run_ranks
from tests.reference import sgd
from tests.session.training import QUIET, descend, on_ranks, pipeline

FAST = {**QUIET, "profile_iterations": 1}
X, Y = torch.linspace(-2.0, 2.0, 64).view(8, 8).sin(), torch.arange(8) % 4
SPLIT = {**FAST, "num_stages": 2, "num_micro_batches": 2, "inputs": "replicated"}
PARTS = "abcde"
CPU, META = torch.device("cpu"), torch.device("meta")


def scores_or_loss(self: Any, x: Tensor, y: Tensor | None = None) -> Tensor:
    scores: Tensor = self.last(self.norm(torch.relu(self.first(x))))
    return scores if y is None else F.cross_entropy(scores, y)


def make_net() -> Any:
    return Written(scores_or_loss, first=nn.Linear(8, 16), norm=nn.BatchNorm1d(16), last=nn.Linear(16, 4))


def test_a_call_after_a_first_one_that_failed_plans_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, whoever tried again (in a notebook, say) met an assertion."""
    net = make_net()
    model, plan = AutoVaruna(net, sgd(net.parameters()), **FAST, num_micro_batches=2), preparation.make_plan
    monkeypatch.setattr(preparation, "make_plan", lambda problem: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(X, Y)
    monkeypatch.setattr(preparation, "make_plan", plan)
    model(X, Y).backward()
    assert model.plan is not None and model.num_traces == 1


@pytest.mark.parametrize("verbosity", ["none", "short", "full"])
def test_a_first_step_is_eight_lines_at_most(verbosity: str, caplog: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """Also where each phase takes long: one line of each, and two of the plan. None, or the whole table, if asked."""
    monkeypatch.setattr(log, "_LONG_SECONDS", 0.0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    options = {"deployment_file": str(tmp_path / "plan.json"), "num_micro_batches": 2, "verbosity": verbosity}
    AutoVaruna(net, sgd(net.parameters()), **options)(torch.randn(8, 8)).square().mean().backward()
    told = "\n".join(each.getMessage() for each in caplog.records if each.name.startswith("autovaruna"))
    phases = ["tracing", "trying", "measuring", "planning", "splitting"]
    if verbosity == "none":
        assert not told
        return
    assert [line.split()[0] for line in told.splitlines() if line.endswith(" ...")] == phases
    assert f"the plan, saved to {tmp_path / 'plan.json'}: 1 stage, " in told
    assert ("\nbound " in told) == (verbosity == "full")
    assert len(told.splitlines()) <= 8 or verbosity == "full"


def test_evaluating_first_changes_nothing() -> None:
    net = make_net()

    def train(world: World, evaluates_first: bool) -> list[float]:
        own, losses = copy.deepcopy(net), []
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.1)
        model = AutoVaruna(own, optimizer, **SPLIT)
        if evaluates_first:
            model.eval()
            with torch.no_grad():
                assert torch.equal(model(X), copy.deepcopy(net).eval()(X))
            assert not own.norm.training
            model.train()
        for _ in range(3):
            losses.append(model(X, Y))
            descend(losses[-1], optimizer)
        return [loss.item() for loss in losses]

    first, other = (run_ranks(2, partial(train, evaluates_first=each)) for each in (False, True))
    assert first[0][-1] < first[0][0]
    assert first == other


def test_a_plan_for_evaluation_alone_refuses_to_train() -> None:
    model = AutoVaruna(make_net(), num_micro_batches=2, **FAST)
    with torch.no_grad():
        model(X)
    with pytest.raises(InputError, match="planned for evaluation"):
        model(X, Y)


def encode(self: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        features = self.encoder(x)
    return F.cross_entropy(self.last(torch.relu(self.first(features))), y)


def test_what_no_gradient_goes_through_is_measured_as_it_runs() -> None:
    """Once its code was older than its graph until a copy was made: two names of one part, and a KeyError."""
    encoder = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    net = Written(encode, encoder=encoder, first=nn.Linear(8, 16), last=nn.Linear(16, 4))

    def be_rank(world: World) -> float:
        loss = AutoVaruna(copy.deepcopy(net), **{**SPLIT, "profile_iterations": 2})(X, Y)
        loss.backward()
        return loss.item()

    assert run_ranks(2, be_rank) == pytest.approx([net(X, Y).item()] * 2)


def trace_wrongly(*args: Any, **kwargs: Any) -> TracedModel:
    """Returns a trace that has lost its last bias."""
    found = trace(*args, **kwargs)
    node = found.module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[-1]
    node.args = node.args[:2]
    return found


def test_all_ranks_hear_of_a_difference_unless_that_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "trace", trace_wrongly)
    case = CASES["chain"]

    def call(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Any:
        try:
            return model(**case.batch(6, 0)[1]).item()
        except TraceError as error:
            return str(error)

    first, second = on_ranks(pipeline(2), case.model(), call)
    assert "computes something else than the model itself" in first
    assert second.startswith("rank 0 failed while comparing the trace with the model")
    found = on_ranks(pipeline(2, settings={"check_trace": False}), case.model(), call)
    assert all(isinstance(each, float) for each in found)


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


def first_call(world: World, **settings: Any) -> None:
    AutoVaruna(Mlp(8), **SPLIT, **settings)(torch.zeros(4, WIDTH)).backward()


def test_a_second_run_measures_nothing(measured: Counter[tuple[str, int]]) -> None:
    run_ranks(2, first_call)
    assert measured and set(measured.values()) == {1}
    measured.clear()
    run_ranks(2, first_call)
    assert not measured
    run_ranks(2, partial(first_call, profile_cache=False))
    assert set(measured.values()) == {1}


LOOKS = {
    "slow once": ([[1, 1 / 2], [1, 1], [1, 1]], (1, 1)),
    "slow in turn": ([[1, 1 / 2], [1, 2], [1, 1 / 2]], (1, 1)),
    "noise": ([[1, 0.85], [1, 0.85], [1, 0.85]], (1, 1)),
    "slow": ([[1, 1 / 2, 1], [1, 1 / 3, 1], [1, 0.4, 1]], (1, 0.4, 1)),
    "fast": ([[1, 1, 2], [1, 1, 2], [1, 1, 3]], (1, 1, 2)),
    "all slow": ([[0.5, 0.6, 0.55], [0.5, 0.45, 0.5], [0.5, 0.6, 0.4]], (0.5, 0.5, 0.5)),
}


@pytest.mark.parametrize("kind", LOOKS)
def test_a_rank_differs_if_it_does_at_every_look(kind: str) -> None:
    looks, speeds = LOOKS[kind]
    assert persistent_speeds(looks) == pytest.approx(speeds)


@pytest.mark.parametrize(("factors", "speeds"), [((1.0, 1.15), (1, 1 / 1.15)), ((), (1, 1)), ((1.2,), (1, 1))])
def test_a_slow_rank_is_planned_for(factors: Any, speeds: Any, monkeypatch: Any, tmp_path: Path) -> None:
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
    monkeypatch.setattr(SpeedWatch, "speeds_of_samples", lambda watch: (1.0, 1 / 3, 1.0)[:num_ranks])
    measured: list[tuple[str, int]] = []

    def measure(traced: Any, rank: int, *_: Any, share: tuple[int, int], **__: Any) -> dict[Key, PartCost]:
        mine, is_second = PARTS[share[0] :: share[1]], share[0] != rank
        measured.extend((name, rank) for name in mine)
        factor = (3 if rank == 1 else 1) * (10 if is_second else 1)
        seconds = {name: factor * (1 + PARTS.index(name)) for name in mine}
        return {(name, 4): PartCost(s, 2 * s, Bytes(0, (), (), 0, 0)) for name, s in seconds.items()}

    def run(world: World) -> dict[Key, PartCost]:
        watch, settings = SpeedWatch(world, torch.device("cpu")), Settings(profile_iterations=iterations)
        traced: Any = SimpleNamespace(graph=SimpleNamespace(blocks=()))
        rank: Any = world.rank
        return MeasuredModel(rank, traced, (), settings, watch).measure([4], ())

    monkeypatch.setattr(measuring, "measure", measure)
    num_turns = min(iterations, measuring.MOST_TURNS)
    for found in run_ranks(num_ranks, run):
        seconds = {name: each.forward_seconds for (name, _), each in found.items()}
        assert seconds == pytest.approx({name: 1 + place for place, name in enumerate(PARTS)})
    assert len(set(measured)) == len(PARTS) * min(num_turns, num_ranks) and len(measured) == len(PARTS) * num_turns


def gpu(number: int) -> torch.device:
    return torch.device("cuda", number)


def said_to_be_on(*devices: torch.device) -> nn.ParameterList:
    """Returns a model with one parameter on each device, without any such device."""
    mode, meta = FakeTensorMode(), torch.zeros(2, device="meta")
    tensors = [meta if device == META else fake_like(torch.zeros(2), mode, device) for device in devices]
    return nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Lets torch say that there are four GPUs, and notes which one is current."""
    if torch.version.cuda and (torch.cuda.is_available() or torch.__version__ < "2.12"):
        pytest.skip("fake tensors ask the driver for the GPU")
    state = SimpleNamespace(current=0)
    for name, value in {"is_available": True, "init": None, "device_count": 4}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(state, "current", device.index))
    for name in LOCAL_RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return state


DEVICES: list[tuple[list[torch.device], str, str, int, torch.device]] = [
    ([CPU], "auto", "3", 0, CPU),
    ([], "auto", "3", 0, CPU),
    ([META], "auto", "3", 0, gpu(3)),
    ([META], "auto", "5", 0, gpu(1)),  # more ranks than GPUs
    ([META], "auto", "", 0, gpu(0)),  # no launcher
    ([META], "auto", "3", 2, gpu(2)),  # the script has chosen
    ([gpu(0)], "auto", "3", 0, gpu(3)),
    ([gpu(0), META], "auto", "1", 0, gpu(1)),
    ([gpu(0)], "auto", "3", 2, gpu(2)),
    ([gpu(2)], "auto", "3", 0, gpu(2)),
    ([gpu(0), gpu(1)], "auto", "3", 0, gpu(0)),  # a model over several devices stays as it is
    ([CPU], "cuda", "3", 0, gpu(3)),
    ([gpu(0)], "cpu", "3", 0, CPU),
]


@pytest.mark.parametrize("row", DEVICES, ids=str)
def test_a_rank_computes_on_a_device_of_its_own(row: Any, four_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, setting, local_rank, four_gpus.current, expected = row
    if local_rank:
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", local_rank)
    assert find_device(said_to_be_on(*devices), Settings(device=setting)) == expected


class Moved(nn.Module):
    """Notes where it is moved: tensors cannot go to GPUs that are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = said_to_be_on(gpu(0))[0]
        self.places: list[Any] = []

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.places.append(fn(SimpleNamespace(is_meta=False, to=lambda device: device)))
        return self


def test_a_model_on_the_first_gpu_goes_to_the_own_one_which_becomes_current(four_gpus: Any, monkeypatch: Any) -> None:
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
