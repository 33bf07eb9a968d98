"""Whether an optimizer updates each parameter by itself is seen in a trial, which leaves the optimizer as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autovaruna.profiler.separable import steps_of
from tests.profiler.own_optimizers import JOINT, SEPARATE, EachAlone, Lamb, Langevin, Lion, Unknown

CPU = torch.device("cpu")
BUILT_IN = {
    name: optimizer
    for name, optimizer in vars(torch.optim).items()
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    if name not in ("Optimizer", "LBFGS")
}


def parameters(name: str = "") -> list[nn.Parameter]:
    """Returns some of several shapes, with gradients; Muon takes matrices alone."""
    shapes = [(20, 30), (30,), (5, 7), (9,), (4, 3, 3, 3)]
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes if name != "Muon" or len(shape) == 2]
    for each in made:
        each.grad = torch.randn_like(each)
    return made


@pytest.mark.parametrize("name", BUILT_IN)
def test_all_of_torch_step_separately(name: str) -> None:
    assert steps_of(BUILT_IN[name](parameters(name)), CPU).kind == "separate"


@pytest.mark.parametrize("name", SEPARATE)
def test_what_updates_each_parameter_by_itself_is_separate(name: str) -> None:
    assert steps_of(SEPARATE[name](parameters()), CPU).kind == "separate"


@pytest.mark.parametrize("name", JOINT)
def test_what_joins_parameters_is_found(name: str) -> None:
    steps = steps_of(JOINT[name](parameters()), CPU)
    assert steps.kind == "joint" and "small tensors changed one of shape" in steps.what


def test_noise_is_found() -> None:
    assert steps_of(Langevin(parameters()), CPU).kind == "random"


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_rate_that_warms_up_from_zero_hides_nothing(rate: Any) -> None:
    optimizer = Lamb(parameters(), max_norm=0.1)
    optimizer.param_groups[0]["lr"] = rate
    assert steps_of(optimizer, CPU).kind == "joint"
    assert float(optimizer.param_groups[0]["lr"]) == 0.0


def test_what_counts_for_small_gradients_alone_is_found() -> None:
    """Once, a decay over the size of all gradients was lost beside large ones."""

    class Decays(EachAlone):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            size = sum(float(each.grad.square().sum()) for each in self.param_groups[0]["params"])
            for each in self.param_groups[0]["params"]:
                each.data.mul_(1 - 1e-9 / (1e-9 + size)).sub_(each.grad, alpha=1e-3)

    assert steps_of(Decays(parameters()), CPU).kind == "joint"


def test_groups_are_tried_together() -> None:
    class OverGroups(EachAlone):
        """Scales a group by how many gradients the one before has."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            size = sum(float(each.grad.norm()) for each in self.param_groups[0]["params"])
            for each in self.param_groups[-1]["params"]:
                each.data.sub_(each.grad, alpha=1e-3 * size)
            for each in self.param_groups[0]["params"]:
                each.data.sub_(each.grad, alpha=1e-3)

    every = parameters()
    assert steps_of(OverGroups([{"params": [each]} for each in every[:2]]), CPU).kind == "joint"  # type: ignore[arg-type]


def test_what_cannot_be_tried_says_why() -> None:
    assert "its attribute held holds a Linear" in steps_of(Unknown(parameters()), CPU).what
    assert "less than two parameters" in steps_of(Lion(parameters()[:1]), CPU).what


@pytest.mark.parametrize("name", [*SEPARATE, *JOINT])
def test_a_trial_leaves_no_trace(name: str) -> None:
    """State, hooks, numbers, gradients and the generator of random numbers are what they were; so is a used state."""
    every = parameters()
    optimizer = (SEPARATE | JOINT)[name](every)
    called = []
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        optimizer.register_step_pre_hook(lambda *_: called.append(1))
    optimizer.step(lambda: torch.tensor(1.0))
    before = repr((optimizer.state, optimizer.param_groups, [each.grad for each in every])), len(called)
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    assert (steps_of(optimizer, CPU).kind == "separate") == (name in SEPARATE)
    assert before == (repr((optimizer.state, optimizer.param_groups, [each.grad for each in every])), len(called))
    assert torch.equal(generator, torch.get_rng_state()) and threads == torch.get_num_threads()
