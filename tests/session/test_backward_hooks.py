"""Hooks of backward on submodules see each micro-batch: what they do to a sample must not depend on the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna
from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.reference import compare, plain_steps
from tests.session.training import QUIET, pipeline, train

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
