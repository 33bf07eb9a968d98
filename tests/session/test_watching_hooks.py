"""Forward hooks that only watch see the samples of each step once, and nothing of tracing, measuring or comparing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.errors import TraceError
from tests.reference import sgd
from tests.session.training import Setup, on_ranks, pipeline

PER_RANK = {"inputs": "per_rank"}
SETUPS = {
    "one": Setup(((0,),), num_micro_batches=2, settings=PER_RANK),
    "two": pipeline(2, num_micro_batches=4, settings=PER_RANK),
    "recompute": pipeline(2, num_micro_batches=4, recompute=True, settings=PER_RANK),
    "replicas": Setup(((0, 1),), num_micro_batches=2, settings=PER_RANK),
}
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def layers(is_in_place: bool = False) -> nn.Sequential:
    """Makes three layers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(is_in_place), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class Notes:
    """Notes what modules return; counts in a variable, a list, and an attribute."""

    def __init__(self, model: nn.Module, places: tuple[int, ...] = (0, 4)) -> None:
        self.seen: dict[int, list[Tensor]] = {place: [] for place in places}
        self.num_calls = 0
        for place in places:
            model[place].register_forward_hook(self.hook_of(place))  # type: ignore[index]

    def hook_of(self, place: int) -> Any:
        """Returns a hook that reads numbers, which no trace could."""

        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            assert output.shape[0] == args[0].shape[0] and float(output.abs().sum()) > 0
            self.num_calls += 1
            self.seen[place].append(output.detach())

        return hook


def train(model: Any, optimizer: Any, notes: Notes, part: slice) -> list[dict[int, list[Tensor]]]:
    """Makes two steps; returns what was noted in each."""
    found = []
    for _ in range(2):
        notes.seen = {place: [] for place in notes.seen}
        model(X[part]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(notes.seen)
    return found


@pytest.mark.parametrize("setup", SETUPS)
def test_a_hook_sees_each_sample_once(setup: str) -> None:
    """Once, it saw traced calls and those of measuring, and not one step."""
    size = 8 // SETUPS[setup].world_size

    def run(model: Any, optimizer: Any, rank: int) -> list[dict[int, list[Tensor]]]:
        notes = Notes(getattr(model, "module", model))
        found = train(model, optimizer, notes, slice(rank * size, rank * size + size))
        assert notes.num_calls == sum(len(each) for step in found for each in step.values())
        return found

    found = on_ranks(SETUPS[setup], layers(), run)
    plain = layers()
    expected = train(plain, sgd(plain.parameters()), Notes(plain), slice(None))
    for step in range(2):
        for place, (wanted,) in expected[step].items():
            rows = torch.cat([row for of_rank in found for row in of_rank[step][place]])
            torch.testing.assert_close(rows[rows.sum(1).argsort()], wanted[wanted.sum(1).argsort()])


def test_a_hook_may_come_and_go() -> None:
    def run(model: AutoVaruna, optimizer: Any, rank: int) -> list[int]:
        counts = []
        seen: list[int] = []
        for is_there in (False, True, False):
            handle = model.module[2].register_forward_hook(lambda *given: seen.append(len(given[2])))  # type: ignore[index]
            if not is_there:
                handle.remove()
            model(X[:4]).square().mean().backward()
            counts.append(sum(seen))
            handle.remove()
        return counts

    found = on_ranks(SETUPS["two"], layers(), run)
    assert [sum(each) for each in zip(*found, strict=True)] == [0, 8, 8]


def test_a_hook_that_changes_the_result_is_traced() -> None:
    model, plain = layers(), layers()
    for each in (model, plain):
        each[0].register_forward_hook(lambda module, args, output: 2 * output)
    for out in on_ranks(pipeline(2, num_micro_batches=2), model, lambda wrapped, _, rank: wrapped(X).detach()):
        torch.testing.assert_close(out, plain(X).detach())


def test_a_result_that_is_changed_in_place_is_refused() -> None:
    """The hook would see it as it is after that."""

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        Notes(model.module, (0,))
        with pytest.raises(TraceError, match=r"hook of 0 watches what cannot be shown.*inplace=False"):
            model(X)

    on_ranks(pipeline(2, num_micro_batches=2), layers(True), run)
