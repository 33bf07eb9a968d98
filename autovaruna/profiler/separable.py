"""Finds out whether an optimizer updates each parameter by its own numbers alone, by trying a copy of it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from autovaruna.graph.random import python_generators, untouched_generator
from autovaruna.profiler.optimizer_copy import nested
from autovaruna.profiler.optimizer_trial import WAYS, Trial

_SCALES = (1.0, 1.0), (1e3, 1e3), (1.0, 1e-4), (1e3, 1e-4)
"""What rates and gradients are multiplied by: what is joined may count only where something is large or small."""
_MOST_GROUPS, _MOST_ALIKE = 12, 2


@dataclass(frozen=True)
class Steps:
    """How an optimizer steps.

    Attributes:
        kind: each parameter by itself; several together; with numbers that it draws; or that cannot be tried.
        what: what was seen, in words.
    """

    kind: Literal["separate", "joint", "random", "unknown"]
    what: str = ""


def steps_of(optimizer: Optimizer, device: torch.device) -> Steps:
    """Compares some steps over a few small tensors with the same steps over halves of them, the others left out.

    A copy steps, with the options, attributes and optimizers that the optimizer holds, whose generators of random
    numbers are given back as they were. What a step does later than a few steps is not seen.

    Args:
        optimizer: The optimizer, with all its parameters, of which some may be elsewhere.
        device: Where it steps.
    """
    chosen = list(_chosen(optimizer))
    if len(chosen) < 2:
        return Steps("unknown", "it has less than two parameters that are trained")
    errors: list[str] = []
    starts = (False, True) if any(each.state for each in nested(optimizer)) else (False,)
    with untouched_generator(torch.device("cpu")), untouched_generator(device), python_generators(0):
        for way in WAYS:
            found: list[Steps] = []
            for is_new in starts:
                try:
                    found.append(_of_scales(partial(Trial, optimizer, chosen, device, way, is_new)))
                except Exception as error:  # whatever a class of the script's raises
                    errors.append(f"{type(error).__name__}: {error}")
            if found:
                return next((each for each in found if each.kind in ("joint", "random")), found[0])
    return Steps("unknown", errors[0])


def _of_scales(make: Callable[[float, float], Trial]) -> Steps:
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


def _repeated(trial: Trial) -> Steps | None:
    """Returns what is seen if the same steps do not give the same numbers, or none."""
    every = range(len(trial.chosen))
    whole, again = trial.whole[0], trial.run(every)[0]
    for place in every:
        if not whole[place][0].isfinite().all() or torch.equal(whole[place][-1], trial.starts[place]):
            return Steps("unknown", "a trial step on small tensors changes nothing, or gives no numbers")
    if not all(_are_equal(whole[place], again[place]) for place in every):
        return Steps("random", "the same steps from the same start gave other numbers")
    return None


def _compared(trial: Trial) -> Steps:
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


def _are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)) for first, second in pairs)


def _are_close(one: Tensor, other: Tensor, start: Tensor) -> bool:
    """Says whether two results are the same, on a GPU but for rounding of the numbers and of how far they have come."""
    if torch.equal(one, other):
        return True
    epsilon = 0.0 if one.device.type == "cpu" else torch.finfo(one.dtype).eps
    tolerance = min(64 * epsilon, 1e-2)
    way = (one - start).abs().max().nan_to_num().item()
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * way, equal_nan=True)
