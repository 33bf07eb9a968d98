"""Ranks compare a trace with the model before they split it, and hear of a difference together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autovaruna import AutoVaruna, TraceError
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from autovaruna.runtime.transport.threads import run_ranks
from autovaruna.session import traces
from tests.catalogue import CASES
from tests.reference import sgd
from tests.session.training import QUIET, Setup, on_ranks, pipeline

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


def test_all_ranks_hear_of_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "trace", trace_wrongly)
    first, second = call()
    assert "computes something else than the model itself" in first
    assert second.startswith("rank 0 failed while comparing the trace with the model")


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "trace", trace_wrongly)
    assert all(isinstance(each, float) for each in call(check_trace=False))


@pytest.mark.parametrize("place", ["meta", "cpu"])
def test_one_rank_compares_where_the_model_has_memory(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(traces, "compare", lambda *args: looks.append(len(args[2][0])))

    def be_rank(world: Any) -> None:
        with torch.device(place):
            model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        AutoVaruna(model, num_micro_batches=2, num_stages=2, **QUIET)(torch.ones(6, 8))

    run_ranks(2, be_rank)
    assert looks == ([] if place == "meta" else [4])


def numbers(check_trace: bool) -> list[Any]:
    """Returns losses and statistics of a model with dropout and BatchNorm, and what torch draws after two steps."""

    def be_rank(world: Any) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        wrapped = AutoVaruna(model, num_micro_batches=2, check_trace=check_trace, **QUIET)
        x = torch.linspace(-1, 1, 64).reshape(8, 8)
        outputs = [wrapped(x).tolist() for _ in range(2)]
        return outputs, model[1].running_var.tolist(), model[1].num_batches_tracked.item()  # type: ignore[union-attr,operator]

    return [*run_ranks(1, be_rank), torch.rand(3).tolist()]


def test_numbers_are_the_same_without_it() -> None:
    assert numbers(True) == numbers(False)
