"""Hooks: of backward, which see each micro-batch, and of forward that watch or change what the model computes."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, CutPoint
from autovaruna.errors import TraceError
from autovaruna.graph.call import describe
from autovaruna.graph.trace import trace
from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.reference import compare, plain_steps, sgd
from tests.session.training import QUIET, Setup, on_ranks, pipeline, train

PER_RANK = {"inputs": "per_rank"}
SETUPS = {
    "one": Setup(((0,),), num_micro_batches=2, settings=PER_RANK),
    "two": pipeline(2, num_micro_batches=4, settings=PER_RANK),
    "recompute": pipeline(2, num_micro_batches=4, recompute=True, settings=PER_RANK),
    "replicas": Setup(((0, 1),), num_micro_batches=2, settings=PER_RANK),
}
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def layers(is_in_place: bool = False) -> nn.Sequential:
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


def train_of_watching_hooks(model: Any, optimizer: Any, notes: Notes, part: slice) -> list[dict[int, list[Tensor]]]:
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
        found = train_of_watching_hooks(model, optimizer, notes, slice(rank * size, rank * size + size))
        assert notes.num_calls == sum(len(each) for step in found for each in step.values())
        return found

    found = on_ranks(SETUPS[setup], layers(), run)
    plain = layers()
    expected = train_of_watching_hooks(plain, sgd(plain.parameters()), Notes(plain), slice(None))
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


def test_a_hook_may_hold_what_cannot_be_copied() -> None:
    def run(model: AutoVaruna, optimizer: Any, rank: int) -> int:
        watch = Locked()
        model.module[2].register_forward_hook(watch)  # type: ignore[index]
        for _ in range(2):
            model(X[:4]).square().mean().backward()
        return watch.num_samples

    assert sum(on_ranks(SETUPS["two"], layers(), run)) == 16


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


def test_a_cut_point_between_hooks_stays_one() -> None:
    """Marks of both kinds are on one tensor; what hooks compute for themselves changes no name of the model's."""
    seen: list[Tensor] = []
    model = nn.Sequential(nn.Linear(6, 6), CutPoint(), nn.Tanh(), nn.Linear(6, 1))
    for layer in model:
        layer.register_forward_hook(lambda *given: seen.append(given[2].detach().tanh()))
    wrapped = AutoVaruna(model, num_micro_batches=2, **QUIET)
    wrapped(X).square().mean().backward()
    assert [len(each) for each in seen] == [4] * 8
    (mark,) = trace(model, describe(model, (X,), {})[1], torch.device("cpu")).graph.cut_marks
    assert (mark.name, mark.block) == ("1", 1)


SIZE = 6
BATCHES = [labelled(SIZE, step) for step in range(2)]


class Hooked(nn.Module):
    """A classifier with a layer that a hook is registered on."""

    def __init__(self, hook: Callable[..., Any], is_pre: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        register = self.middle.register_full_backward_pre_hook if is_pre else self.middle.register_full_backward_hook
        register(hook)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.middle(self.first(x).tanh()).tanh()), y)


def over_batch(module: nn.Module, *gradients: Any) -> Any:
    """Divides the gradients of all samples by their common length; a hook of either kind."""
    return tuple(each / each.norm() for each in gradients[0])


def over_sample(module: nn.Module, *gradients: Any) -> Any:
    """Divides the gradient of each sample by its length."""
    return tuple(each / each.norm(dim=1, keepdim=True) for each in gradients[0])


@pytest.mark.parametrize("is_pre", [False, True])
def test_what_a_hook_sees_is_said(is_pre: bool, caplog: pytest.LogCaptureFixture) -> None:
    """One that goes by several samples gives other numbers, which nothing but its code tells."""
    AutoVaruna(Hooked(over_batch, is_pre), num_micro_batches=2, **QUIET)(**labelled(SIZE, 0)[1])
    assert "middle have hooks of backward" in caplog.text and "pass num_micro_batches=1" in caplog.text


@pytest.mark.parametrize("is_pre", [False, True])
def test_hooks_of_single_samples_go_on(is_pre: bool) -> None:
    case = Case("hooked", lambda: Hooked(over_sample, is_pre), labelled)
    compare(train(case, pipeline(2), BATCHES), plain_steps(case, BATCHES))


def test_whole_batches_may_meet_in_hooks() -> None:
    case = Case("joined", lambda: Hooked(over_batch), labelled)
    compare(train(case, pipeline(2, num_micro_batches=1), BATCHES), plain_steps(case, BATCHES))


class Keeps:
    """Counts its calls, and keeps what it has seen."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.calls = 0

    def hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.calls += 1
        self.seen.append(len(outputs[0]))


def test_what_hooks_keep_is_of_the_steps_alone() -> None:
    """A module is tried out without its hooks."""
    keeps = Keeps()
    wrapped = Hooked(keeps.hook)
    AutoVaruna(wrapped, num_micro_batches=2, **QUIET)(**labelled(SIZE, 0)[1]).backward()
    assert (keeps.calls, keeps.seen) == (2, [3, 3])
