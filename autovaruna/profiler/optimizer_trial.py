"""Steps copies of an optimizer over small tensors, with gradients that are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autovaruna.profiler.optimizer_copy import copy_for

_NUM_STEPS, _NUM_ALIKE = 12, 8
"""Steps of a trial, and how many of them have gradients of about the same direction: sums over steps then grow."""
_LONGEST = 8
_RATE = 1e-3

Way = Callable[[Optimizer, Callable[[], Tensor]], Any]
Paths = dict[int, list[Tensor]]
"""The numbers of each parameter after each step, by its place among those that are tried."""


class Trial:
    """Steps of copies of an optimizer.

    Args:
        optimizer: The optimizer.
        chosen: The parameters that are tried.
        device: Where they are.
        way: How a step is asked for.
        is_new: Whether copies start without the state that the optimizer has: it may not fit small tensors, or hide
            what the first steps join.
        rate, gradient: What rates and gradients are multiplied by.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        chosen: Sequence[Tensor],
        device: torch.device,
        way: Way,
        is_new: bool,
        rate: float,
        gradient: float,
    ) -> None:
        self.chosen = chosen
        self._optimizer, self._device, self._way, self._is_new = optimizer, device, way, is_new
        self._rate, self._scale = rate, gradient
        self.starts = [self._start(place, parameter) for place, parameter in enumerate(chosen)]

    @cached_property
    def whole(self) -> tuple[Paths, dict[str, float]]:
        """What steps over all of the parameters make."""
        return self.run(range(len(self.chosen)))

    def _start(self, place: int, parameter: Tensor) -> Tensor:
        """Returns the numbers that a parameter starts with: small and large ones, and zeros that show any change."""
        shape = tuple(min(size, _LONGEST) for size in parameter.shape)
        sign, exponent, choice = (_normal(place, -number, shape) for number in (1, 2, 3))
        numbers = sign.sign() * 10.0 ** (exponent - 1.0) * (choice > -0.7)
        return numbers.to(self._device, parameter.dtype)

    def run(self, part: Sequence[int]) -> tuple[Paths, dict[str, float]]:
        """Returns what steps over some of the parameters make of them, and of the optimizer's own numbers."""
        made = {place: self._parameter(place) for place in range(len(self.chosen))}
        optimizers = copy_for(self._optimizer, {id(self.chosen[place]): made[place] for place in made})
        stepped = {place: made[place] for place in part}
        for each in optimizers:
            if self._is_new:
                each.state.clear()
            _leave(each, {id(parameter) for parameter in stepped.values()})
        _scale_rates(optimizers, self._rate)
        paths: Paths = {place: [] for place in part}
        for number in range(_NUM_STEPS):
            self._step(optimizers[0], stepped, number)
            for place, parameter in stepped.items():
                paths[place].append(parameter.detach().clone())
        return paths, dict(_numbers(optimizers))

    def _parameter(self, place: int) -> nn.Parameter:
        made = nn.Parameter(self.starts[place].clone())
        made.__dict__.update(vars(self.chosen[place]))  # marks that a script puts on parameters
        return made

    def _step(self, optimizer: Optimizer, parameters: dict[int, nn.Parameter], number: int) -> None:
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            for place, parameter in parameters.items():
                parameter.grad = self._gradient(place, number, calls, parameter)
                if self._way is _with_sparse:
                    parameter.grad = parameter.grad.to_sparse(1)
            return torch.tensor(2.0 - number / _NUM_STEPS + calls / 100, device=self._device)

        closure()
        with torch.enable_grad():
            self._way(optimizer, closure)

    def _gradient(self, place: int, number: int, calls: int, parameter: Tensor) -> Tensor:
        """Draws a gradient, which changes with the parameter; those of one are up to 30,000 times those of another."""
        shape = tuple(parameter.shape)
        curved = parameter.detach().to("cpu", torch.float64) * _curvature(place, shape)
        scale: float = 10.0 ** (1.5 * (place * 5 % 4) - 3.0) * (30.0 if number >= _NUM_ALIKE else 1.0)
        return curved.add_(_slope(place, number, calls, shape)).mul_(scale * self._scale).to(parameter)


@lru_cache(maxsize=4096)
def _slope(place: int, number: int, calls: int, shape: tuple[int, ...]) -> Tensor:
    """Draws the part of a gradient that does not depend on the parameter."""
    base, noise = _normal(place, number // _NUM_ALIKE, shape), _normal(place, 100 * (number + 1) + calls, shape)
    return base + 0.3 * noise


@lru_cache(maxsize=4096)
def _curvature(place: int, shape: tuple[int, ...]) -> Tensor:
    """Draws what a parameter is multiplied by in its gradient."""
    return 5.0 * _normal(place, 2, shape).abs()


@lru_cache(maxsize=4096)
def _normal(place: int, number: int, shape: tuple[int, ...]) -> Tensor:
    """Draws normal numbers that depend on the arguments alone."""
    generator = torch.Generator().manual_seed(1_000_003 * (place + 1) + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _leave(optimizer: Optimizer, stepped: set[int]) -> None:
    """Leaves some parameters in the groups."""
    for group in optimizer.param_groups:
        group["params"][:] = [each for each in group["params"] if id(each) in stepped]


def _scale_rates(optimizers: Sequence[Optimizer], scale: float) -> None:
    """Multiplies learning rates; lets groups learn whose rate is zero at the start."""
    groups = {id(group): group for each in optimizers for group in each.param_groups}
    for group in groups.values():
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rate.copy_((rate if rate.any() else torch.full_like(rate, _RATE)) * scale)
        elif isinstance(rate, int | float):
            group["lr"] = (rate or _RATE) * scale


def _numbers(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, float]]:
    """Yields the floating-point numbers that optimizers keep beside the state of parameters."""
    for place, each in enumerate(optimizers):
        tables = [vars(each), *each.param_groups]
        for number, table in enumerate(tables):
            for name, value in table.items():
                is_number = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
                if is_number or isinstance(value, float):
                    owner = "its attribute" if number == 0 else f"in group {number - 1} its option"
                    yield f"{owner} {name}" + (f" (optimizer {place})" if place else ""), float(value)


def _plain_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Returns the step of a class without what PyTorch puts around it to call hooks."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def _alone(optimizer: Optimizer, closure: Callable[[], Tensor]) -> None:
    _plain_step(optimizer)(optimizer)


def _with_closure(optimizer: Optimizer, closure: Callable[[], Tensor]) -> None:
    _plain_step(optimizer)(optimizer, closure)


def _with_sparse(optimizer: Optimizer, closure: Callable[[], Tensor]) -> None:
    _plain_step(optimizer)(optimizer)


WAYS: tuple[Way, ...] = (_alone, _with_closure, _with_sparse)
