"""Hooks of forward, which watch or change what the model computes; those of backward are refused."""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.errors import TraceError
from tests.reference import sgd
from tests.session.training import QUIET, Setup, descend, on_ranks, pipeline, same_gradients

PER_RANK = {"inputs": "per_rank"}
SETUPS = {
    "one": Setup(((0,),), num_micro_batches=2, settings=PER_RANK),
    "two": pipeline(2, num_micro_batches=4, settings=PER_RANK),
    "recompute": pipeline(2, num_micro_batches=4, recompute=True, settings=PER_RANK),
    "replicas": Setup(((0, 1),), num_micro_batches=2, settings=PER_RANK),
}
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def layers(is_in_place: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(is_in_place), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class Notes:
    """Notes what modules return; counts in a variable, a list, and an attribute."""

    def __init__(self, model: nn.Module, places: tuple[int, ...] = (0, 4)) -> None:
        self.seen: dict[int, list[Tensor]] = {place: [] for place in places}
        self.num_calls = 0
        for place in places:
            model[place].register_forward_hook(partial(self.watch, place))

    def watch(self, place: int, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Reads numbers, which no trace could."""
        assert output.shape[0] == args[0].shape[0] and float(output.abs().sum()) > 0
        self.num_calls += 1
        self.seen[place].append(output.detach())


@pytest.mark.parametrize("setup", SETUPS)
def test_a_hook_sees_each_sample_once(setup: str) -> None:
    """Once, it saw traced calls and those of measuring, and not one step."""
    size, plain = 8 // SETUPS[setup].world_size, layers()

    def run(model: Any, optimizer: Any, rank: int) -> list[dict[int, list[Tensor]]]:
        notes, found = Notes(getattr(model, "module", model)), []
        own = X if model is plain else X[rank * size : rank * size + size]
        for _ in range(2):
            notes.seen = {place: [] for place in notes.seen}
            descend(model(own).square().mean(), optimizer)
            found.append(notes.seen)
        assert notes.num_calls == sum(len(each) for step in found for each in step.values())
        return found

    found = on_ranks(SETUPS[setup], plain, run)
    expected = run(plain, sgd(plain.parameters()), 0)
    for step in range(2):
        for place, (wanted,) in expected[step].items():
            rows = torch.cat([row for of_rank in found for row in of_rank[step][place]])
            torch.testing.assert_close(rows[rows.sum(1).argsort()], wanted[wanted.sum(1).argsort()])


class Locked:
    """Counts samples under a lock, which can neither be copied nor pickled."""

    def __init__(self) -> None:
        self.lock, self.num_samples = Lock(), 0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        with self.lock:
            self.num_samples += len(output)


def test_a_hook_may_come_and_go_and_hold_what_cannot_be_copied() -> None:
    def run(model: AutoVaruna, optimizer: Any, rank: int) -> list[int]:
        counts, watch = [], Locked()
        for is_there in (False, True, False):
            handle = model.module[2].register_forward_hook(watch)
            if not is_there:
                handle.remove()
            model(X[:4]).square().mean().backward()
            counts.append(watch.num_samples)
            handle.remove()
        return counts

    found = on_ranks(SETUPS["two"], layers(), run)
    assert [sum(each) for each in zip(*found, strict=True)] == [0, 8, 8]


def test_a_list_that_a_hook_fills_is_no_value_of_the_trace() -> None:
    """Once, the ranks' calls did not fit together: only the last stage's rank had more in its list."""

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> list[int]:
        notes, counts = list[float](), []
        model.module[4].register_forward_hook(lambda module, args, output: notes.append(output.mean().item()))
        for _ in range(3):
            model(X[:4]).square().mean().backward()
            counts.append(len(notes))
            notes.clear()
        assert model.num_traces == 1
        return counts

    assert on_ranks(SETUPS["two"], layers(), run) == [[0] * 3, [4] * 3]


def test_a_result_that_is_changed_in_place_is_refused() -> None:
    """The hook would see it as it is after that."""

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        Notes(model.module, (0,))
        with pytest.raises(TraceError, match=r"hook of 0 watches what cannot be shown.*inplace=False"):
            model(X)

    on_ranks(pipeline(2, num_micro_batches=2), layers(True), run)


def test_a_hook_of_backward_is_refused() -> None:
    """A trace would drop it; a function with a backward of its own does the same."""
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        model = layers()
        getattr(model[2], register)(lambda module, *gradients: None)
        with pytest.raises(TraceError, match=r"2 has a hook of backward.*torch\.autograd\.Function"):
            AutoVaruna(model, num_micro_batches=2, **QUIET)(X)


class Scale:
    """Multiplies what a module returns."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.factor


HOOKS: dict[str, Any] = {
    "closure": lambda factor: lambda module, args, output: output * factor,
    "object": Scale,
    "partial": lambda factor: partial(lambda by, module, args, output: output + by, factor),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_in_the_place_of_another_changes_the_next_step(name: str) -> None:
    """Once, as many hooks were the same hooks."""

    def act(model: Any) -> None:
        for make in (lambda: HOOKS[name](2.0), lambda: HOOKS[name](3.0), lambda: lambda module, args, output: -output):
            handle = getattr(model, "module", model)[2].register_forward_hook(make())
            model(X).square().mean().backward()
            handle.remove()

    same_gradients(Setup(num_micro_batches=2), layers(), act)
