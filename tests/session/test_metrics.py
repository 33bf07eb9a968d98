"""Holds `model.metrics` to numbers computed by hand from plain PyTorch, on one process and on ranks."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.ranks.world import World
from autovaruna.runtime import metrics as metrics_module
from autovaruna.schedule.simulation import StepSeconds
from tests.catalogue.small import Written
from tests.rank_threads import run_ranks
from tests.session.training import QUIET, trace_shared

BATCH, LENGTH, WORDS, WIDTH = 4, 6, 11, 8
STAGES = QUIET | {"stage_ranks": [[0], [1]], "num_micro_batches": 4}
REPLICAS = QUIET | {"num_stages": 1, "num_replicas": 2}


@pytest.fixture(autouse=True)
def _equal_models_are_traced_once(request: pytest.FixtureRequest) -> Iterator[None]:
    with trace_shared(request.node.nodeid):
        yield


@pytest.fixture(autouse=True)
def _every_norm_is_worth_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "_SHARE_FOR_NORM", math.inf)


def talk(self: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits and loss, as many models do."""
    logits = self.last(torch.relu(self.first(self.embed(tokens))))
    return logits, nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def talk_by_name(self: Any, tokens: Tensor) -> dict[str, Tensor]:
    return dict(zip(("logits", "loss"), talk(self, tokens), strict=True))


def talker(forward: Any = talk) -> nn.Module:
    layers = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, WORDS)}
    return Written(forward, embed=nn.Embedding(WORDS, WIDTH), **layers)


def loss_of(out: Any) -> Tensor:
    return out["loss"] if isinstance(out, dict) else out[1]


def words(step: int, rank: int = 0) -> Tensor:
    return torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(100 * step + rank))


def steps(model: Any, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields loss and norm of each step, which clips; then the rate halves."""
    for batch in batches:
        loss = loss_of(model(batch))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        yield loss, norm
        optimizer.param_groups[0]["lr"] /= 2


def norms_by_hand(net: nn.Module, num_ranks: int, num_steps: int) -> list[tuple[float, float]]:
    """Returns loss and norm of each step of plain PyTorch over the global batch."""
    batches = [torch.cat([words(step, rank) for rank in range(num_ranks)]) for step in range(num_steps)]
    return [(loss.item(), norm.item()) for loss, norm in steps(net, torch.optim.SGD(net.parameters(), lr=1.0), batches)]


def train(net: nn.Module, rank: int, num_steps: int, **settings: Any) -> tuple[AutoVaruna, list[dict[str, float]]]:
    """Returns the model and, after each step, what its metrics say, with the step of the norm."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = AutoVaruna(net, optimizer, **settings)
    own, metrics = [words(step, rank) for step in range(num_steps)], model.metrics
    said = [metrics.to_dict() | {"norm of": metrics.gradient_norm_step or 0} for _ in steps(model, optimizer, own)]
    return model, said


@pytest.mark.parametrize("kind", [talk, talk_by_name])
def test_one_process_counts_what_plain_pytorch_does(kind: Any) -> None:
    torch.manual_seed(0)
    net = talker(kind)
    by_hand = norms_by_hand(copy.deepcopy(net), 1, 3)
    model, said = train(net, 0, 3, **QUIET)
    assert model.plan is None and model.metrics.step == 3
    for step, (now, (loss, norm)) in enumerate(zip(said, by_hand, strict=True)):
        assert now["loss"] == pytest.approx(loss) and now["learning_rate"] == 0.5**step
        assert now["norm of"] == step + 1 and now["gradient_norm"] == pytest.approx(norm, rel=1e-6)
        assert now["seconds/step"] == pytest.approx(now["seconds/work"] + now["seconds/optimizer"])
        assert now["tokens_per_second"] == pytest.approx(LENGTH * now["samples_per_second"])
        assert now["memory_bytes/rank_0"] >= 0  # nothing, where what earlier tests held was given back meanwhile
    assert said[0]["samples_per_second"] == pytest.approx(BATCH / said[0]["seconds/step"])


@pytest.mark.parametrize("settings", [STAGES, REPLICAS, STAGES | {"stage_ranks": [[0, 1]], "shard_optimizer": True}])
def test_ranks_count_the_global_batch(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, num_steps = talker(), 4
    by_hand = norms_by_hand(copy.deepcopy(net), 2, num_steps)

    def be_rank(world: World) -> tuple[list[dict[str, float]], str, float]:
        model, said = train(copy.deepcopy(net), world.rank, num_steps, **settings)
        assert model.plan is not None
        return said, str(model.metrics), model.plan.bound_seconds

    for said, text, bound in run_ranks(2, be_rank):
        for step, (now, (loss, _)) in enumerate(zip(said, by_hand, strict=True)):
            assert now["loss"] == pytest.approx(loss, rel=1e-5) and now["learning_rate"] == 0.5**step
            assert now["tokens_per_second"] == pytest.approx(LENGTH * now["samples_per_second"])
            assert now["norm of"] == step
            if step:
                assert now["gradient_norm"] == pytest.approx(by_hand[step - 1][1], rel=1e-5)
            parts = [now[f"seconds/{name}"] for name in ("work", "bubble", "messages", "sums", "optimizer")]
            assert min(parts) >= 0 and sum(parts) <= now["seconds/step"] * (1 + 1e-6)
            assert now["share_of_bound"] == pytest.approx(bound / now["seconds/step"])
        assert said[0]["samples_per_second"] == pytest.approx(2 * BATCH / said[0]["seconds/step"])
        assert {"memory_bytes/rank_0", "memory_bytes/rank_1"} <= said[-1].keys()
        assert f"(of step {num_steps - 1})" in text and "rank 0 " in text and "rank 1 " in text


def test_the_rate_counts_from_step_to_step_and_over_accumulated_calls() -> None:
    torch.manual_seed(0)
    net = talker()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = AutoVaruna(net, optimizer, **QUIET)
    around = []
    for step in range(3):
        begin = time.perf_counter()
        for _ in range(2):
            model(words(step))[1].backward()
        time.sleep(0.02)
        before = time.perf_counter()
        optimizer.step()
        around.append((begin, before, time.perf_counter()))
        optimizer.zero_grad()
        with torch.no_grad():
            model(words(9))
        time.sleep(0.02)  # as a loader would
    (_, before, after), (begin, last_before, last_after) = around[1:]
    assert model.metrics.samples_per_second is not None and model.metrics.seconds is not None
    seconds = 2 * BATCH / model.metrics.samples_per_second
    assert last_before - after <= seconds <= last_after - before
    assert 0.02 <= model.metrics.seconds.step <= last_after - begin


def test_a_rank_that_is_waited_for_shows_in_the_others_messages() -> None:
    net, slept = talker(), 0.1

    def be_rank(world: World) -> list[StepSeconds]:
        own, found = copy.deepcopy(net), []
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        model = AutoVaruna(own, optimizer, **STAGES)
        for step in range(6):
            model(words(step, world.rank))[1].backward()
            time.sleep(slept * world.rank)
            optimizer.step()
            assert model.metrics.seconds is not None
            found.append(model.metrics.seconds)
        return found

    first, second = run_ranks(2, be_rank)
    assert max(each.messages for each in first) > 0.8 * slept  # it comes to the next call and waits there
    assert all(each.step - sum(each[1:]) >= slept for each in second)  # to sleep is no part of a step's own


def test_a_loss_of_the_scripts_own_counts_all_but_the_loss() -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD([{"params": [net.weight], "lr": 0.1}, {"params": [net.bias], "lr": 0.2}])
    model = AutoVaruna(net, optimizer, **QUIET)
    assert model.metrics.to_dict() == {} and str(model.metrics).split() == ["step", "0"]
    for _ in range(2):
        model(torch.ones(5, 3)).square().mean().backward()
        optimizer.step()
    said = model.metrics.to_dict()
    assert model.metrics.step == 2 and model.metrics.loss is None and "tokens_per_second" not in said
    assert (said["learning_rate/0"], said["learning_rate/1"]) == (0.1, 0.2)
    assert said["samples_per_second"] > 0 and said["gradient_norm"] > 0


def test_without_an_optimizer_a_step_ends_where_the_next_begins() -> None:
    model = AutoVaruna(talker(), **QUIET)
    for step in range(2):
        model(words(step))[1].backward()
    assert model.metrics.step == 2 and model.metrics.learning_rates == ()
    assert model.metrics.seconds is not None and model.metrics.seconds.optimizer == 0
    assert model.metrics.samples_per_second == pytest.approx(BATCH / model.metrics.seconds.step)
