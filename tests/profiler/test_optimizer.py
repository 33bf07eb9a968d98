"""Optimizers that are tried out: state, work, seconds, and whether they join parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.profiler import optimizer_cost
from autovaruna.profiler.optimizer_cost import measure_step, state_factor, work_factors
from autovaruna.profiler.optimizer_trial import steps_of
from tests.profiler.clock import WorkClock, work_clock
from tests.profiler.models import CPU
from tests.profiler.own_optimizers import JOINT, SEPARATE, EachAlone, Lamb, Langevin, Unknown, parameters_of

Make = Callable[[nn.Module], torch.optim.Optimizer]


def kept_factor(optimizer: torch.optim.Optimizer) -> float:
    """Returns the bytes of state after a real step for each byte of parameters."""
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    return float(sum(value.nbytes for value in state) / sum(parameter.nbytes for parameter in parameters_of(optimizer)))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns matrices, with momentum, and vectors, without."""
    matrices, vectors = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    return [{"params": matrices, "momentum": 0.9}, {"params": vectors}]


MAKERS: dict[str, Make] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True, foreach=True),
    "factored": lambda model: torch.optim.Adafactor(model.parameters()),
    "one group in two": lambda model: torch.optim.SGD(two_groups(model), lr=0.1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_state_is_what_a_real_step_keeps(name: str) -> None:
    """Shapes, groups and factored state count as they are."""
    model = nn.Sequential(nn.Linear(96, 200), nn.Linear(200, 8))
    found = state_factor(MAKERS[name](model))
    assert found == pytest.approx(kept_factor(MAKERS[name](model)), abs=1e-9)


def test_a_loop_needs_bytes_for_one_tensor_and_foreach_for_all() -> None:
    """AdamW makes the root of its second moment, and what it divides by; one tensor after the other, or all at once."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    loop = work_factors(torch.optim.AdamW(model.parameters(), foreach=False), CPU)
    assert loop == pytest.approx((0.0, 2.0), abs=0.02)
    of_all, of_largest = work_factors(torch.optim.AdamW(model.parameters(), foreach=True), CPU)
    assert of_all == pytest.approx(1.0, abs=0.01) and of_largest == pytest.approx(0.0, abs=0.01)
    assert work_factors(torch.optim.SGD(model.parameters(), lr=0.1), CPU) == (0.0, 0.0)


class Cubic(torch.optim.SGD):
    """Multiplies every matrix by itself, as Muon and Shampoo do, many times."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in parameters_of(self):
            assert each.grad is not None
            for _ in range(5):
                each.grad @ each.grad.T
        super().step(closure)


def plain_step_seconds(model: nn.Module, optimizer: torch.optim.Optimizer, clock: WorkClock) -> float:
    """Returns the seconds of a second step of the optimizer itself."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    begin = clock()
    optimizer.step()
    return clock() - begin


@pytest.mark.parametrize("make", [MAKERS["sgd"], MAKERS["adamw"], lambda model: Cubic(model.parameters(), lr=0.1)])
def test_the_steps_of_a_model_are_predicted_from_its_own_shapes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, tensors of a fixed size were tried out: a step that grows with the side of a matrix took minutes."""
    model = nn.Sequential(*(nn.Linear(48, 96, bias=False) for _ in range(3)), nn.Linear(8, 48, bias=False))
    monkeypatch.setattr(optimizer_cost, "_BUDGET_SECONDS", 100.0)  # of this clock
    with work_clock(optimizer_cost) as clock:
        found = measure_step(make(model), CPU)
        begin = clock()
        plain = plain_step_seconds(model, make(model), clock)
    assert found.seconds(4, sum(each.nbytes for each in model.parameters())) == pytest.approx(plain, rel=0.1)
    assert begin < 1000


BUILT_IN = {
    name: optimizer
    for name, optimizer in vars(torch.optim).items()
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    if name not in ("Optimizer", "LBFGS", "SparseAdam")  # sparse gradients are refused
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


@pytest.mark.parametrize("name", JOINT)
def test_what_joins_parameters_is_found(name: str) -> None:
    steps = steps_of(JOINT[name](parameters()), CPU)
    assert steps.kind == "joint" and "small tensors changed one of shape" in steps.what


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_rate_that_warms_up_from_zero_hides_nothing(rate: Any) -> None:
    optimizer = Lamb(parameters(), max_norm=0.1)
    optimizer.param_groups[0]["lr"] = rate
    assert steps_of(optimizer, CPU).kind == "joint"
    assert float(optimizer.param_groups[0]["lr"]) == 0.0


class Decays(EachAlone):
    """Once, a decay over the size of all gradients was lost beside large ones."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        size = sum(float(each.grad.square().sum()) for each in self.param_groups[0]["params"])
        for each in self.param_groups[0]["params"]:
            each.data.mul_(1 - 1e-9 / (1e-9 + size)).sub_(each.grad, alpha=1e-3)


class OverGroups(EachAlone):
    """Scales a group by the gradients that the one before has."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        size = sum(float(each.grad.norm()) for each in self.param_groups[0]["params"])
        for number, group in enumerate(self.param_groups):
            for each in group["params"]:
                each.data.sub_(each.grad, alpha=1e-3 * (size if number else 1.0))


def test_noise_small_gradients_and_groups_are_seen_and_what_cannot_be_tried_says_why() -> None:
    assert steps_of(Langevin(parameters()), CPU).kind == "random"
    assert steps_of(Decays(parameters()), CPU).kind == "joint"
    assert steps_of(OverGroups([{"params": [each]} for each in parameters()[:2]]), CPU).kind == "joint"  # type: ignore[arg-type]
    assert "its attribute held holds a Linear" in steps_of(Unknown(parameters()), CPU).what


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


@pytest.mark.parametrize("name", [*SEPARATE, *JOINT])
def test_a_parameter_alone_is_tried_beside_one_like_it(name: str) -> None:
    """Once, a tied weight alone was no subject for a trial, and its optimizer's state could not be shared."""
    optimizer = {**SEPARATE, **JOINT}[name](parameters()[:1])
    kind = "separate" if name in SEPARATE else "joint" if name == "lbfgs" else "unknown"
    assert steps_of(optimizer, CPU).kind == kind
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    frozen = torch.optim.SGD([each.requires_grad_(False) for each in parameters()], lr=0.1)
    assert steps_of(frozen, CPU).kind == "separate"
