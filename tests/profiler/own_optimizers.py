"""Defines optimizers as scripts bring them along: some update each parameter by itself, some join all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reference import MakeOptimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]


class EachAlone(Optimizer):
    """Updates one parameter after the other; what makes an update of a gradient is for the class to say."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.01, **options: Any) -> None:
        super().__init__(parameters, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.add_(self.update(each, each.grad, self.state[each]), alpha=-group["lr"])

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        """Returns what is taken off, but for the learning rate."""
        raise NotImplementedError


class AdaBelief(EachAlone):
    """Divides by how far gradients are from their average (Zhuang et al., 2020)."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        average = state.setdefault("average", torch.zeros_like(parameter))
        spread = state.setdefault("spread", torch.zeros_like(parameter))
        average.lerp_(gradient, 0.1)
        spread.lerp_((gradient - average).square() + 1e-6, 0.01)
        return average / (spread.sqrt() + 1e-3)


class Lamb(AdaBelief):
    """Scales Adam's update to the norm of the tensor; may first clip all gradients by their norm (You et al., 2020)."""

    def __init__(self, parameters: Iterable[nn.Parameter], max_norm: float = 0.0) -> None:
        super().__init__(parameters)
        self.max_norm = max_norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.max_norm:
            nn.utils.clip_grad_norm_(parameters_of(self), self.max_norm)
        super().step()

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        found = super().update(parameter, gradient, state)
        return found * parameter.norm() / (found.norm() + 1e-6)


class LateLamb(Lamb):
    """Clips once it has warmed up."""

    num = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num += 1
        self.max_norm = 0.1 * (self.num > 500)
        super().step()


class Prodigy(EachAlone):
    """Estimates one learning rate from sums over all parameters (after Mishchenko and Defazio, 2023)."""

    distance = 1e-6

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        joined, total = 0.0, 0.0
        for each in parameters_of(self):
            state = self.state[each]
            start = state.setdefault("start", each.clone())
            total_of_one = state.setdefault("total", torch.zeros_like(each))
            total_of_one += each.grad
            joined += float((each.grad * (start - each)).sum())
            total += float(total_of_one.abs().sum())
        self.distance = max(self.distance, joined / total)
        super().step()

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return gradient.sign() * self.distance


class Langevin(EachAlone):
    """Adds noise (Welling and Teh, 2011)."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return gradient + torch.randn_like(gradient)


class Lookahead(Optimizer):
    """Steps with another one and follows it slowly (Zhang et al., 2019); initialises nothing of its base class."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state = {}  # type: ignore[assignment]
        self.slow = {each: each.detach().clone() for each in parameters_of(base)}
        self.num_steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for each in parameters_of(self):
                self.slow[each].lerp_(each.detach(), 0.5)
                each.data.copy_(self.slow[each])


class Sam(Optimizer):
    """Takes the gradient where a step along it, as long as `rho` over all parameters, leads (Foret et al., 2021)."""

    def __init__(self, parameters: Iterable[nn.Parameter], base: Callable[..., Optimizer]) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = base(self.param_groups, lr=0.01)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM needs a closure"
        every, set_gradients = parameters_of(self), torch.enable_grad()(closure)
        set_gradients()
        norm = torch.stack([each.grad.norm() for each in every]).norm()
        for each in every:
            self.state[each]["up"] = each.grad * 0.05 / norm
            each.add_(self.state[each]["up"])
        set_gradients()
        for each in every:
            each.sub_(self.state[each]["up"])
        self.base.step()


class Unknown(EachAlone):
    """Cannot be copied: it holds a module."""

    def __init__(self, parameters: Iterable[nn.Parameter], does_join: bool = False) -> None:
        super().__init__(parameters)
        self.held, self.does_join = nn.Linear(1, 1), does_join

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.total = sum(each.grad.square().sum() for each in parameters_of(self)) if self.does_join else 1.0
        super().step()

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return gradient / (1 + gradient.norm()) / self.total


SEPARATE: dict[str, MakeOptimizer] = {
    "lamb": Lamb,
    "lookahead": lambda parameters: Lookahead(torch.optim.Adam(parameters, lr=0.01)),
}
JOINT: dict[str, MakeOptimizer] = {
    "lamb_that_clips": lambda parameters: Lamb(parameters, max_norm=0.1),
    "lamb_that_clips_late": LateLamb,
    "prodigy": Prodigy,
    "sam": lambda parameters: Sam(parameters, torch.optim.SGD),
    "lbfgs": torch.optim.LBFGS,
}
