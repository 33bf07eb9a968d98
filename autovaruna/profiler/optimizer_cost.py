"""Finds what an optimizer costs, on tensors of its own: the state that it keeps, what a step needs on top, its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autovaruna.graph.facts import tensors_in
from autovaruna.interception.optimizer_proxy import parameters_of
from autovaruna.profiler.bytes import meter_of
from autovaruna.profiler.measure import own_clock
from autovaruna.profiler.optimizer_trial import CannotCopyError, asks_for_closure, copy_for, nested
from autovaruna.profiler.records import OptimizerCost

_SMALL, _NUM_SMALL = (16, 16), 8
_LARGE_BYTES = 32 << 20  # of all trial tensors of the model's own shape together: more than a core's caches hold
_MOST_TIMES = 128
_BUDGET_SECONDS = 0.5  # of one step that is tried out
_LEAST_ELEMENTS = 1 << 12
_LINEAR = 1.25  # seconds that grow by a lower power of the elements are linear in them, but for caches
_TIMED_STEPS = 2
_MOST_ELEMENTS = 1 << 16  # a larger tensor is tried out as a smaller one of about the same shape

Options = dict[str, Any]
Tried = TypeVar("Tried")


def _by_shape(
    group: dict[str, Any], try_out: Callable[[Options, torch.Size, torch.dtype], Tried]
) -> Iterator[tuple[nn.Parameter, Tried]]:
    """Yields the trained parameters of a group, each with what a trial with its options shows of its shape."""
    known: dict[tuple[torch.Size, torch.dtype], Tried] = {}
    for parameter in group["params"]:
        if parameter.requires_grad and parameter.numel():
            key = parameter.shape, parameter.dtype
            if key not in known:
                known[key] = try_out(_options(group), *key)
            yield parameter, known[key]


def state_factor(optimizer: Optimizer) -> float:
    """Returns the bytes of state for each byte of a trained parameter, trying out each shape of each group once."""

    def factor_of(options: Options, shape: torch.Size, dtype: torch.dtype) -> float:
        trial = _trial(_shrunk(shape), dtype, torch.device("cpu"))
        copy = _copy(optimizer, options, [trial])
        _step(copy)
        return sum(each.nbytes for each in _state_of(copy, trial)) / trial.nbytes

    parameter_bytes, state_bytes = 0.0, 0.0
    for group in optimizer.param_groups:
        for parameter, factor in _by_shape(group, factor_of):
            parameter_bytes += parameter.nbytes
            state_bytes += factor * parameter.nbytes
    return state_bytes / parameter_bytes if parameter_bytes else 0.0


def measure_step(optimizer: Optimizer, device: torch.device) -> OptimizerCost:
    """Times steps over small tensors and over one of the model's own, with the options of the greatest group.

    The latter is there often enough to fill caches: what a step takes for a byte may depend on the shape (Muon).
    """
    group = max(optimizer.param_groups, key=lambda each: sum(parameter.numel() for parameter in each["params"]))
    dtype = next((parameter.dtype for parameter in group["params"]), torch.float32)

    def seconds(shape: tuple[int, ...], times: int) -> float:
        copy = _copy(optimizer, _options(group), [_trial(shape, dtype, device) for _ in range(times)])
        now, taken = own_clock(device), []
        for _ in range(1 + _TIMED_STEPS):  # the first one makes the state
            started = now()
            _step(copy)
            taken.append(now() - started)
        return min(taken[1:])

    each = seconds(_SMALL, _NUM_SMALL) / _NUM_SMALL
    own = _typical_shape(group["params"])
    tried, one, growth = _affordable(own, dtype.itemsize, seconds)
    num_bytes, tried_bytes = math.prod(own) * dtype.itemsize, math.prod(tried) * dtype.itemsize
    affordable = int(_BUDGET_SECONDS / one) if one > 0 else _MOST_TIMES
    times = min(_LARGE_BYTES // max(tried_bytes, 1), _MOST_TIMES, affordable)
    typical = growth * (seconds(tried, times) / times if times > 1 else one)
    per_byte = max(0.0, typical - each) / num_bytes if num_bytes else 0.0
    return OptimizerCost(each, per_byte, *work_factors(optimizer, device))


def _affordable(
    shape: tuple[int, ...], itemsize: int, seconds: Callable[[tuple[int, ...], int], float]
) -> tuple[tuple[int, ...], float, float]:
    """Finds the largest tensor of about a shape that can be tried out.

    Returns its shape, the seconds of a step with it, and how many times longer one with `shape` takes.
    """
    power, most = 1.0, _LEAST_ELEMENTS
    tried = _shrunk(shape, most)
    taken = seconds(tried, 1)
    while tried != shape:
        most *= 4
        larger = _shrunk(shape, most)
        ratio = math.prod(larger) / math.prod(tried)
        if math.prod(larger) * itemsize > _LARGE_BYTES or taken * ratio**power > _BUDGET_SECONDS:
            break
        before, taken, tried = taken, seconds(larger, 1), larger
        power = math.log(taken / before, ratio) if before > 0 and taken > 0 else 1.0
        power = power if power > _LINEAR else 1.0
    return tried, taken, (math.prod(shape) / max(math.prod(tried), 1)) ** power


def work_factors(optimizer: Optimizer, device: torch.device) -> tuple[float, float]:
    """Returns the bytes that a step needs on top, for each byte of all trained parameters, and of the largest one.

    What three of a shape need more than two grows with all; what two need more than that, a loop holds of the last.
    """
    total = of_all = largest = of_largest = 0.0
    for group in optimizer.param_groups:
        left = 0.0
        for parameter, factors in _by_shape(group, partial(_work_factors_of, optimizer, device)):
            each, own, kept = (factor * parameter.nbytes for factor in factors)
            total, of_all = total + parameter.nbytes, of_all + each
            largest, of_largest = max(largest, parameter.nbytes), max(of_largest, left + own)
            left = kept
    return (of_all / total, of_largest / largest) if total else (0.0, 0.0)


def _typical_shape(parameters: Sequence[nn.Parameter]) -> tuple[int, ...]:
    """Returns the shape of the parameter whose size is next to that of the one in which a byte lies on average."""
    total = sum(parameter.nbytes for parameter in parameters)
    typical = sum(parameter.nbytes**2 for parameter in parameters) / total if total else 0.0
    nearest = min(parameters, key=lambda each: abs(each.nbytes - typical), default=None)
    return tuple(nearest.shape) if nearest is not None else (0,)


def _work_factors_of(
    optimizer: Optimizer, device: torch.device, options: Options, shape: torch.Size, dtype: torch.dtype
) -> tuple[float, float, float]:
    """Returns the bytes that a step needs for each byte of a tensor: with all, while at it, and while at the next."""

    def needed(count: int) -> float:
        """Returns what the second step over so many tensors needs on top; the first one makes the state."""
        trials = [_trial(_shrunk(shape), dtype, device) for _ in range(count)]
        copy = _copy(optimizer, options, trials)
        _step(copy)
        state = [each for trial in trials for each in _state_of(copy, trial)]
        gradients = [trial.grad for trial in trials if trial.grad is not None]
        with meter_of(device, [*trials, *gradients, *state]) as meter:
            _step(copy)
            return float(meter.restart())

    one, two, three = map(needed, (1, 2, 3))
    num_bytes = math.prod(_shrunk(shape)) * dtype.itemsize
    each = max(0.0, three - two)
    return each / num_bytes, max(0.0, one - each) / num_bytes, max(0.0, two - one - each) / num_bytes


def _shrunk(shape: Iterable[int], most: int = _MOST_ELEMENTS) -> tuple[int, ...]:
    """Halves the longest dimension until there are at most so many elements."""
    sizes = list(shape)
    while math.prod(sizes) > most:
        longest = sizes.index(max(sizes))
        sizes[longest] = (sizes[longest] + 1) // 2
    return tuple(sizes)


def _step(optimizer: Optimizer) -> None:
    """Steps once; one that asks for a closure (LBFGS) gets one that computes gradients of a parabola."""

    def closure() -> Tensor:
        for parameter in parameters:
            parameter.grad = parameter.detach() + 1e-3
        return sum((each.detach().square().sum() for each in parameters), start=torch.zeros(()))

    if not asks_for_closure(optimizer):
        optimizer.step()
        return
    parameters = parameters_of(optimizer)
    optimizer.step(closure)  # type: ignore[arg-type]


def _copy(optimizer: Optimizer, options: Options, trials: list[nn.Parameter]) -> Optimizer:
    """Returns an optimizer of the same class and options with other parameters, and no state.

    One that asks for more than parameters (another optimizer that it wraps, the number of steps) is copied.
    """
    try:
        needed = {"lr": optimizer.defaults["lr"]} if "lr" in optimizer.defaults else {}  # some classes require it
        return type(optimizer)([{"params": trials, **options}], **needed)
    except Exception as error:
        try:
            copies = copy_for(optimizer, {})
        except CannotCopyError:
            raise error from None
    for each in copies:
        own = options if each is copies[0] else _options(each.param_groups[0])
        each.param_groups[:] = [{**own, "params": trials}]
        each.state.clear()
    return copies[0]


def _state_of(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    """Returns the tensors that an optimizer, and those that it wraps, keep of a parameter."""
    tables = {id(each.state): each.state for each in nested(optimizer)}.values()
    return [each for table in tables for each in tensors_in(table.get(parameter, {}))]


def _options(group: dict[str, Any]) -> Options:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _trial(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    trial = nn.Parameter(torch.full(tuple(shape), 0.5, dtype=dtype, device=device))
    trial.grad = torch.full_like(trial, 1e-3)
    return trial
