"""Finds out whether an optimizer updates each parameter by its own numbers alone, by stepping copies of it."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import product
from threading import RLock
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autovaruna._torch import pytree
from autovaruna.graph.random import python_generators, untouched_generator
from autovaruna.interception.optimizer_proxy import parameters_of

_TRIAL_STEPS, _NUM_ALIKE = 12, 8
"""Steps of a trial, and how many of them have gradients of about the same direction: sums over steps then grow."""
_LATE_STEPS, _LATE = 2, 10**6
"""Steps that follow, before which what counts steps is moved on so far: a warm-up of the optimizer's own has ended."""
_LONGEST = 8
_RATE = 1e-3
_SCALES = (1.0, 1.0), (1e3, 1e3), (1.0, 1e-4), (1e3, 1e-4)
"""What rates and gradients are multiplied by: what is joined may count only where something is large or small."""
_MOST_GROUPS, _MOST_ALIKE = 12, 2


class CannotCopyError(Exception):
    """The optimizer holds what its step would change, or take numbers from, whatever parameters it is given."""


def copy_for(optimizer: Optimizer, exchanged: Mapping[int, nn.Parameter]) -> list[Optimizer]:
    """Returns a copy of an optimizer, and of those that it steps with, without state and hooks.

    Parameters that are not `exchanged`, by identity, have no elements in it. A module, or a function with variables
    of its own, cannot be copied.
    """
    originals = nested(optimizer)
    memo: dict[int, Any] = {id(each): type(each).__new__(type(each)) for each in originals}
    for each in originals:
        for parameter in parameters_of(each):
            memo[id(parameter)] = exchanged.get(id(parameter), nn.Parameter(torch.empty(0)))
    for each in originals:
        for value in vars(each).values():
            if isinstance(value, dict) and any(isinstance(key, Tensor) for key in value):
                memo[id(value)] = _cut_table(value, exchanged, memo)
    for each in originals:
        vars(memo[id(each)]).update({name: copy.deepcopy(value, memo) for name, value in _contents(each)})
    return [memo[id(each)] for each in originals]


def nested(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those that it holds."""
    found = [optimizer]
    for each in found:
        held = (entry for value in vars(each).values() for entry in _flat(value))
        found += dict.fromkeys(entry for entry in held if isinstance(entry, Optimizer) and entry not in found)
    return found


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def _contents(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yields the attributes that a copy needs: not methods that have been replaced, and no hooks."""
    for name, value in vars(optimizer).items():
        if callable(value) and hasattr(type(optimizer), name):
            continue
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            yield name, OrderedDict()
            continue
        for each in _flat(value):
            if isinstance(each, nn.Module) or (isinstance(each, FunctionType) and each.__closure__):
                raise CannotCopyError(f"its attribute {name} holds a {type(each).__name__}")
        yield name, value


def _cut_table(table: dict[Any, Any], exchanged: Mapping[int, nn.Parameter], memo: dict[int, Any]) -> dict[Any, Any]:
    """Returns a table by parameter of those that are exchanged, its tensors cut to the size of what stands for them."""
    found = copy.copy(table)
    found.clear()
    for key, value in table.items():
        if not isinstance(key, Tensor):
            found[key] = copy.deepcopy(value, memo)
        elif id(key) in exchanged:
            new = exchanged[id(key)]
            found[new] = pytree.tree_map_only(Tensor, partial(_cut, new), value)
    return found


def _cut(new: Tensor, tensor: Tensor) -> Tensor:
    sizes = new.shape if tensor.dim() == new.dim() else tensor.shape
    return tensor.detach()[tuple(map(slice, sizes))].clone()


Paths = dict[int, list[Tensor]]
"""The numbers of each parameter after each step, by its place among those that are tried."""


@dataclass(frozen=True)
class OptimizerTrial:
    """Steps of copies of an optimizer.

    They may go on from the state that it has, which some make before the first step. `rate` and `gradient` are what
    rates and gradients are multiplied by.
    """

    optimizer: Optimizer
    chosen: Sequence[Tensor]
    device: torch.device
    passes_closure: bool
    keeps_state: bool
    has_twin: bool  # whether the last one is not the optimizer's, and is to be like the first
    rate: float
    gradient: float

    @cached_property
    def starts(self) -> list[Tensor]:
        """The numbers that each parameter starts with: small and large ones, and zeros that show any change."""
        found = []
        for place, parameter in enumerate(self.chosen):
            shape = tuple(min(size, _LONGEST) for size in parameter.shape)
            sign, exponent, choice = (_normal(place, -number, shape) for number in (1, 2, 3))
            numbers = sign.sign() * 10.0 ** (exponent - 1.0) * (choice > -0.7)
            found.append(numbers.to(self.device, parameter.dtype))
        return found

    @cached_property
    def whole(self) -> tuple[Paths, dict[str, float]]:
        """What steps over all of the parameters make."""
        return self.run(range(len(self.chosen)))

    def run(self, part: Sequence[int]) -> tuple[Paths, dict[str, float]]:
        """Returns what steps over some of the parameters make of them, and of the optimizer's own numbers."""
        made = [nn.Parameter(start.clone()) for start in self.starts]
        for new, parameter in zip(made, self.chosen, strict=True):
            new.__dict__.update(vars(parameter))  # marks that a script puts on parameters
        optimizers = copy_for(self.optimizer, dict(zip(map(id, self.chosen), made, strict=True)))
        if self.has_twin:
            for each in optimizers:
                _add_twin(each, *made)
        stepped = {place: made[place] for place in part}
        for each in optimizers:
            if not self.keeps_state:
                each.state.clear()  # the first steps make it
            for group in each.param_groups:
                group["params"][:] = [own for own in group["params"] if id(own) in map(id, stepped.values())]
        _scale_rates(optimizers, self.rate)
        paths: Paths = {place: [] for place in part}
        counted: dict[tuple[int, str], Any] = {}
        for number in range(_TRIAL_STEPS + _LATE_STEPS):
            if number in (_TRIAL_STEPS - 1, _TRIAL_STEPS):
                counted = _advance(optimizers, counted)
            self._step(optimizers[0], stepped, number)
            for place, parameter in stepped.items():
                paths[place].append(parameter.detach().clone())
        return paths, dict(_numbers(optimizers))

    def _step(self, optimizer: Optimizer, parameters: dict[int, nn.Parameter], number: int) -> None:
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            for place, parameter in parameters.items():
                parameter.grad = self._gradient(place, number, calls, parameter)
            return torch.tensor(2.0 - number / _TRIAL_STEPS + calls / 100, device=self.device)

        closure()
        step: Any = type(optimizer).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # without what PyTorch puts around it to call hooks
        with torch.enable_grad():
            step(optimizer, *((closure,) if self.passes_closure else ()))

    def _gradient(self, place: int, number: int, calls: int, parameter: Tensor) -> Tensor:
        """Draws a gradient, which changes with the parameter; those of one are up to 30,000 times those of another."""
        shape = tuple(parameter.shape)
        curved = parameter.detach().to("cpu", torch.float64) * 5.0 * _normal(place, 2, shape).abs()
        base, noise = _normal(place, number // _NUM_ALIKE, shape), _normal(place, 100 * (number + 1) + calls, shape)
        scale: float = 10.0 ** (1.5 * (place * 5 % 4) - 3.0) * (30.0 if number >= _NUM_ALIKE else 1.0)
        return (curved + base + 0.3 * noise).mul_(scale * self.gradient).to(parameter)


def _add_twin(optimizer: Optimizer, first: nn.Parameter, twin: nn.Parameter) -> None:
    """Has an optimizer step over a second parameter as over its first."""
    for table in vars(optimizer).values():
        if isinstance(table, dict) and first in table:
            table[twin] = copy.deepcopy(table[first])
    for group in optimizer.param_groups:
        if any(each is first for each in group["params"]):
            group["params"].append(twin)


@lru_cache(maxsize=4096)
def _normal(place: int, number: int, shape: tuple[int, ...]) -> Tensor:
    """Draws normal numbers that depend on the arguments alone."""
    generator = torch.Generator().manual_seed(1_000_003 * (place + 1) + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _scale_rates(optimizers: Sequence[Optimizer], scale: float) -> None:
    """Multiplies learning rates; lets groups learn whose rate is zero at the start."""
    groups = {id(group): group for each in optimizers for group in each.param_groups}
    for group in groups.values():
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rate.copy_((rate if rate.any() else torch.full_like(rate, _RATE)) * scale)
        elif isinstance(rate, int | float):
            group["lr"] = (rate or _RATE) * scale


def _advance(optimizers: Sequence[Optimizer], before: Mapping[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
    """Moves on what has grown by one since `before`; returns all whole numbers of optimizers, groups and states."""
    states = (state for each in optimizers for state in each.state.values() if isinstance(state, dict))
    groups = (group for each in optimizers for group in each.param_groups)
    tables = {id(table): table for table in (*map(vars, optimizers), *groups, *states)}
    found = {}
    for place, table in enumerate(tables.values()):
        for name, value in table.items():
            is_number = type(value) is int or (isinstance(value, Tensor) and value.numel() == 1)
            if is_number and float(value).is_integer():
                found[place, name] = int(value)
                if before.get((place, name)) == int(value) - 1:
                    table[name] = value + _LATE
    return found


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


_one_at_a_time = RLock()
"""Ranks that are threads share a generator: one that gives it back would have another one draw its numbers again."""


@dataclass(frozen=True)
class Steps:
    """How an optimizer steps: each parameter by itself, several together, or with numbers that it draws."""

    kind: Literal["separate", "joint", "random", "unknown"]
    what: str = ""


def asks_for_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step must be given a closure (LBFGS)."""
    asked = inspect.signature(optimizer.step).parameters.get("closure")
    return asked is not None and asked.default is inspect.Parameter.empty


def steps_of(optimizer: Optimizer, device: torch.device) -> Steps:
    """Returns how an optimizer steps; one that cannot be tried, and asks for a closure, goes by its loss."""
    steps = _tried(optimizer, device)
    is_led = steps.kind == "unknown" and asks_for_closure(optimizer)
    return Steps("joint", "it goes by the loss that a closure returns") if is_led else steps


def _tried(optimizer: Optimizer, device: torch.device) -> Steps:
    """Compares some steps over a few small tensors with the same steps over halves of them, the others left out.

    A copy steps, with the options, attributes and optimizers that the optimizer holds. Generators are given back as
    they were. What a step does later is seen where the optimizer counts its steps by one.
    """
    chosen = list(_chosen(optimizer))
    if not chosen:
        return Steps("separate")
    has_twin = len(chosen) == 1
    if has_twin:
        chosen.append(nn.Parameter(torch.empty_like(chosen[0], device="meta")))
        vars(chosen[1]).update(vars(chosen[0]))
    errors: list[str] = []
    with _one_at_a_time, untouched_generator(device), python_generators(0):
        for keeps_state, passes_closure in product((False, True), repeat=2):
            try:
                found = _of_scales(
                    partial(OptimizerTrial, optimizer, chosen, device, passes_closure, keeps_state, has_twin)
                )
                return Steps("unknown", found.what) if has_twin and found.kind == "joint" else found
            except Exception as error:  # whatever a class of the script's raises
                errors.append(f"{type(error).__name__}: {error}")
    return Steps("unknown", errors[0])


def _of_scales(make: Callable[[float, float], OptimizerTrial]) -> Steps:
    """Returns what is seen at the optimizer's own rates, unless others show more."""
    own, *others = _SCALES
    trial = make(*own)
    found = _repeated(trial) or _compared(trial)
    for scales in others:
        if found.kind == "separate":
            try:
                trial = make(*scales)
                other = _compared(trial)
                if other.kind == "joint" and _repeated(trial) is None:
                    found = other
            except Exception:  # numbers have run away, which says nothing
                continue
    return found


def _repeated(trial: OptimizerTrial) -> Steps | None:
    """Returns what is seen if the same steps do not give the same numbers, or none."""
    every = range(len(trial.chosen))
    whole, again = trial.whole[0], trial.run(every)[0]
    for place in every:
        if not whole[place][0].isfinite().all() or torch.equal(whole[place][-1], trial.starts[place]):
            return Steps("unknown", "a trial step on small tensors changes nothing, or gives no numbers")
    pairs = (pair for place in every for pair in zip(whole[place], again[place], strict=True))
    if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
        return Steps("random", "the same steps from the same start gave other numbers")
    return None


def _compared(trial: OptimizerTrial) -> Steps:
    every = range(len(trial.chosen))
    whole, numbers = trial.whole
    half, parts = len(every) // 2, []
    for part in (every[::2], every[1::2], every[:half], every[half:]):
        alone, numbers_alone = trial.run(part)
        parts.append(numbers_alone)
        for place in part:
            for number, (one, other) in enumerate(zip(whole[place], alone[place], strict=True), 1):
                if not _are_close(one, other, trial.starts[place]):
                    what = f"step {number} over {len(every)} small tensors changed one of shape {tuple(one.shape)}"
                    return Steps("joint", f"{what} otherwise than the same step over {len(part)} of them")
    odd = next((name for each in parts for name in numbers if numbers[name] != each.get(name)), None)
    return Steps("separate") if odd is None else Steps("unknown", f"{odd} depends on which parameters there are")


def _chosen(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields up to two trained parameters of each group and number of dimensions, of the first groups and the last."""
    groups = optimizer.param_groups
    half = _MOST_GROUPS // 2
    for group in groups if len(groups) <= _MOST_GROUPS else [*groups[:half], *groups[-half:]]:
        alike: dict[int, int] = {}
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.numel() and parameter.is_floating_point():
                alike[parameter.dim()] = alike.get(parameter.dim(), 0) + 1
                if alike[parameter.dim()] <= _MOST_ALIKE:
                    yield parameter


def _are_close(one: Tensor, other: Tensor, start: Tensor) -> bool:
    """Says whether two results are the same, on a GPU but for rounding of the numbers and of how far they have come."""
    if torch.equal(one, other):
        return True
    epsilon = 0.0 if one.device.type == "cpu" else torch.finfo(one.dtype).eps
    tolerance = min(64 * epsilon, 1e-2)
    distance = (one - start).abs().max().nan_to_num().item()
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * distance, equal_nan=True)
