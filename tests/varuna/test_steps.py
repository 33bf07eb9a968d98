"""Scripts in Varuna's style on any grid, held to plain PyTorch; written on one grid, loaded on another."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autovaruna.config.settings import resolve
from autovaruna.errors import AutoVarunaError, CheckpointError, ConfigError, InputError, OrderError
from autovaruna.interception import ending
from autovaruna.planner.prediction import RankOrders
from autovaruna.schedule.pipeline import Kind
from autovaruna.varuna import CutPoint, Varuna
from autovaruna.varuna.step import GROWTH_INTERVAL, JobSignals, StepScale
from tests.catalogue.small import Written
from tests.products import some
from tests.varuna.scripts import GRIDS, QUIET, batch, close, net, on_ranks, plain_steps, steps, wrap


@pytest.mark.parametrize("grid", some([*GRIDS], 4))
def test_a_script_has_the_losses_of_plain_pytorch(grid: str) -> None:
    num_ranks, stage_map = GRIDS[grid]
    of_ranks = on_ranks(num_ranks, lambda world: steps(wrap(stage_map, 7), range(3), max_norm=0.5))
    expected = plain_steps(net(), 7, range(3), max_norm=0.5)
    assert all(losses == of_ranks[0] for losses in of_ranks) and close(of_ranks[0], expected)


def test_a_map_and_micro_batches_that_are_not_given_are_found() -> None:
    def script(world: Any) -> Any:
        model = wrap(None, 8, None)
        return model.stage_to_rank_map, model.micro_batch_size, steps(model, range(2))

    for grid, size, losses in on_ranks(2, script):
        assert sorted(rank for ranks in grid.values() for rank in ranks) == [0, 1] and 1 <= size <= 8
        assert close(losses, plain_steps(net(), 8, range(2)))


def test_stages_start_at_cut_points_unless_the_model_is_partitioned_for_the_user() -> None:
    def starts(auto: bool) -> Any:
        def script(world: Any) -> Any:
            model = wrap("0;1", auto_partitioned=auto)
            graph = model.model.preparation.graph
            return [stage.blocks[0] for stage in model.model.plan.stages[1:]], [m.block for m in graph.cut_marks]

        return on_ranks(2, script)[0]

    found, allowed = starts(False)
    assert set(found) <= set(allowed)
    assert len(starts(True)[0]) == 1


PAIRS = [("embedding.weight", "head.weight"), ("layers.0.weight", "layers.3.weight")]
PAIRS += [("layers.3.weight", "layers.1.weight")]


@pytest.mark.parametrize("grid", some(["grid", "three stages"], 1))
def test_any_number_of_pairs_is_tied(grid: str) -> None:
    num_ranks, stage_map = GRIDS[grid]

    def script(world: Any) -> Any:
        model = wrap(stage_map, shared_weights=PAIRS)
        return steps(model, range(3), 0.5), model.state_dict()

    plain = net()
    plain.head.weight = plain.embedding.weight
    plain.layers[3].weight = plain.layers[1].weight = plain.layers[0].weight
    expected = plain_steps(plain, 6, range(3), 0.5)
    for losses, state in on_ranks(num_ranks, script, token="tied"):
        assert close(losses, expected)
        assert all(torch.equal(state[first], state[second]) for first, second in PAIRS)


@pytest.mark.parametrize("grid", some(["two unequal replicas", "grid"], 1))
def test_evaluation_is_the_mean_over_all_samples_in_eval_mode(grid: str) -> None:
    """Where a stage has more ranks than another, some of them are of one replica."""
    num_ranks, stage_map = GRIDS[grid]

    def script(world: Any) -> Any:
        model = wrap(stage_map, 9, dropout=0.5)
        mine = {name: tensor[model.samples] for name, tensor in batch(9, 7).items()}
        found = [model.evaluate(mine), model.evaluate(mine, batch_size=2), model.evaluate(mine, batch_size=100)]
        place = model.data_depth, model.rank_within_stage, model.samples.start, model.samples.stop
        return found, place, model.training, model.model.module.training

    expected = net().eval()(**batch(9, 7)).item()
    places = {"grid": [0, 0, 1, 1], "two unequal replicas": [0, 1, 0, 1, 0, 1]}[grid]
    for (found, place, *modes), replica in zip(on_ranks(num_ranks, script), places, strict=True):
        assert close(found, [expected] * 3) and modes == [True, True]
        assert place == ((2, 0, 0, 5), (2, 1, 5, 9))[replica]


def test_the_optimizer_comes_after_wrapping_and_a_call_is_refused() -> None:
    def script(world: Any) -> None:
        other = torch.optim.SGD(net().parameters(), lr=0.1)
        wrapped = Varuna(net(), "0;1", batch, 6, 2, **QUIET)
        with pytest.raises(OrderError, match="set_optimizer"):
            wrapped.step(batch(6))
        with pytest.raises(AutoVarunaError, match="made after wrapping"):
            wrapped.set_optimizer(other)
        with pytest.raises(OrderError, match="step"):
            wrapped(**batch(6))

    on_ranks(2, script)


def test_the_state_is_that_of_the_whole_model() -> None:
    def script(world: Any) -> Any:
        model = wrap("0;1")
        steps(model, range(1))
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        steps(model, range(1, 2))
        model.load_state_dict(saved)
        return saved, model.state_dict()

    for saved, loaded in on_ranks(2, script):
        assert list(saved) == list(net().state_dict())
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)


SCORES = Written(lambda self, x, y: self.layer(x.float()), layer=nn.Linear(5, 3))


def tied(first: str, second: str) -> Varuna:
    return wrap(None, shared_weights=[(first, second)])


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: wrap("0;1;2"), "got rank 1"),
        (lambda: wrap("0;a"), "expected the ranks of each stage"),
        (lambda: wrap(None, 0), "batch_size is 0"),
        (lambda: wrap(None, 6, -1), "chunk_size is -1"),
        (lambda: wrap(None).step([1]), "expected a dictionary"),
        (lambda: wrap(None, model=SCORES).step(batch(6)), "returns its loss"),
        (lambda: wrap(None).to(torch.float64), "split"),
        (lambda: wrap(None, device="nowhere"), "device"),
        (lambda: Varuna(net(), None, None, 4, 2), "get_batch_fn is None"),
        (lambda: tied("embedding.weight", "head.wait"), "no parameter of Net; did you mean head.weight"),
        (lambda: tied("embedding.weight", "layers.0.weight"), "one shape and dtype"),
        (lambda: wrap(None, shared_weights=["embedding.weight"]), "pairs of parameter names"),
    ],
)
def test_what_cannot_be_used_is_named(act: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        act()


def test_a_map_gives_each_rank_one_place() -> None:
    def script(world: Any) -> None:
        for stage_map, words in (("0;0", "rank twice"), ("0,1", "rank 2 is in no"), ("0,1;;2", "expected the ranks")):
            with pytest.raises(InputError, match=words):
                wrap(stage_map)

    on_ranks(3, script)


@pytest.mark.parametrize("stage_ranks", [[], [[], [2]], [[0, 1], [1, 0]], [[0, 1], [2, 3, 1, 4]]])
def test_inputs_of_replicas_need_replicas_that_are_apart(stage_ranks: Any) -> None:
    with pytest.raises(ConfigError, match=r"inputs = 'per_replica'.*contradict"):
        resolve({"inputs": "per_replica", "stage_ranks": stage_ranks})


def test_losses_are_those_of_float16_autocast_and_an_overflow_is_skipped_on_all_ranks_at_once() -> None:
    def script(world: Any) -> Any:
        model = wrap("0,2;1,3", fp16=True)
        model.set_optimizer(model.optimizer, init_loss_scale=2.0**10)
        losses, scale = steps(model, range(3), 0.5), model.get_loss_scale()
        model.set_optimizer(model.optimizer, init_loss_scale=2.0**30)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        inputs = {name: tensor[model.samples] for name, tensor in batch(6).items()}
        found = []
        for _ in range(3):
            found.append((model.step(inputs)[1], model.get_loss_scale()))
            model.optimizer.step()  # changes nothing: there are no gradients
        after = model.state_dict()
        return losses, scale, found, all(torch.equal(before[name], after[name]) for name in before)

    expected = plain_steps(net(), 6, range(3), 0.5, scale=2.0**10)
    for losses, scale, found, is_same in on_ranks(4, script):
        assert scale == 2.0**10
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=5e-3, atol=0.0)
        assert found == [(True, 2.0**29), (True, 2.0**28), (True, 2.0**27)] and is_same


def scale_of(*arguments: Any) -> StepScale:
    scale = StepScale(torch.device("cpu"))
    scale.configure(*arguments)
    return scale


def test_a_dynamic_scale_halves_down_to_the_least_and_doubles_after_many_good_steps_and_a_fixed_one_stays() -> None:
    scale = scale_of("dynamic", 8.0, 3.0)
    values = []
    for _ in range(3):
        scale.update(True)
        values.append(scale.value)
    assert values == [4.0, 3.0, 3.0]
    for _ in range(GROWTH_INTERVAL):
        scale.update(False)
    assert scale.value == 6.0
    fixed = scale_of(128.0, 8.0, 1.0)
    fixed.update(True)
    assert fixed.value == 128.0
    for arguments in (("static", 1.0, 1.0), (-1.0, 1.0, 1.0), ("dynamic", 0.0, 1.0), (True, 1.0, 1.0)):
        with pytest.raises(InputError, match="scale"):
            scale_of(*arguments)


def test_the_scripts_own_handler_has_sigusr1_also_where_a_manager_looks_after_the_job(monkeypatch: Any) -> None:
    """Once, the manager's stood in its place, and the run ended without a call of it."""
    monkeypatch.setattr(ending, "_before", {})
    monkeypatch.setattr(ending, "_signals", set())
    called: list[str] = []
    before = {number: signal.getsignal(number) for number in ending.SIGNALS}
    try:
        signal.signal(signal.SIGUSR1, lambda *_: called.append("handler"))
        ending._listen()
        alone: Any = SimpleNamespace(gather_objects=lambda own, what: [own])
        requests = JobSignals(alone, lambda: called.append("before"))
        requests.install()
        signal.raise_signal(signal.SIGUSR1)
        requests.handle()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert called == ["before", "handler"] and not ending.has_signal()


def test_a_step_of_many_micro_batches_is_not_cut_off() -> None:
    """Varuna's schedules end silently at about 5,000 micro-batches."""
    layers = {"first": nn.Linear(1, 1), "cut": CutPoint(), "last": nn.Linear(1, 1)}
    tiny = Written(lambda self, x: self.last(self.cut(self.first(x))).mean(), **layers)
    expected = tiny(torch.arange(6000.0).view(-1, 1)).item()
    model = wrap(None, 6000, 1, model=tiny, make=lambda size: {"x": torch.ones(size, 1)})
    plan, graph = model.model.plan, model.model.preparation.graph
    kinds = [(step.kind, step.micro_batch) for step in RankOrders(plan, graph).planned[0]]
    assert {m for kind, m in kinds if kind is Kind.BACKWARD} == set(range(6000))
    loss, _ = model.step({"x": torch.arange(6000.0).view(-1, 1)})
    assert close([loss], [expected])


def test_a_single_rank_s_deployment_is_read_again(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """A rank alone has links that cost nothing, which JSON cannot say as a number."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "autovaruna")
    for _ in range(2):
        steps(wrap(None, from_cache=True, save_deployment=True, load_deployment="auto"), range(1))
    assert "using the saved deployment" in caplog.text and not list(tmp_path.glob("*.damaged"))


def run(grid: str, first: int, last: int, folder: Path | None = None, **how: Any) -> list[Any]:
    """Trains from a step to another, loads before if that is not the first, and saves after if there is a folder."""
    num_ranks, stage_map = GRIDS[grid]

    def script(world: Any) -> Any:
        dropout = how.get("dropout", 0.0)
        model = wrap(stage_map, 8, None, num_micro_batches=4, dropout=dropout, fp16=how.get("fp16", False))
        if first:
            model.load_checkpoint(folder, first)
        assert model.iteration == first
        losses = steps(model, range(first, last))
        if folder is not None and not first:
            model.checkpoint(folder, tempdir=how.get("tempdir"), shard=how.get("shard", False), on_demand=True)
        return losses, model.get_loss_scale()

    return on_ranks(num_ranks, script)


RUNS = [("grid", "unequal", 0.0), ("two stages", "grid", 0.0), ("one", "two stages", 0.3)]
RUNS += [("unequal", "three stages", 0.0)]


@pytest.mark.parametrize(("source", "target", "dropout"), some(RUNS, 2))
def test_a_run_goes_on_on_any_other_grid(source: str, target: str, dropout: float, tmp_path: Path) -> None:
    """With dropout, micro-batches must be the same: one with replicas has others."""
    whole = run("one", 0, 4, dropout=dropout)[0][0]
    begun = run(source, 0, 2, tmp_path / "store", tempdir=str(tmp_path), shard=True, dropout=dropout)[0][0]
    assert close(begun + run(target, 2, 4, tmp_path / "store", dropout=dropout)[0][0], whole)


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    saved = run("two stages", 0, 2, tmp_path / "store", fp16=True)[0][1]
    assert run("one", 2, 2, tmp_path / "store", fp16=True)[0][1] == saved < 2**20


def test_a_checkpoint_that_is_not_there_is_an_error_or_the_newest_is_loaded(tmp_path: Path, caplog: Any) -> None:
    """Without an optimizer it is loaded for its weights alone, which is said."""
    run("one", 0, 1, tmp_path)
    model = wrap(None)
    with pytest.raises(CheckpointError):
        model.load_checkpoint(tmp_path, 5)
    model.load_checkpoint(tmp_path, 5, check_complete=False)
    assert model.iteration == 1
    model = Varuna(net(), None, batch, 8, None, **QUIET)
    model.load_checkpoint(tmp_path, 1)
    assert "without the optimizer's state" in caplog.text
