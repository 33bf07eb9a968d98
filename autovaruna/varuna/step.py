"""Ends a step in Varuna's way: scales the loss, unscales and clips gradients, says what overflowed; and evaluates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autovaruna._torch import foreach_mul_
from autovaruna.api import AutoVaruna
from autovaruna.errors import InputError
from autovaruna.graph.call import describe
from autovaruna.runtime.collective import on_all
from autovaruna.runtime.world import World
from autovaruna.varuna.batches import Inputs, loss_of, rows_of

GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale doubles."""


class StepScale:
    """The scale of the loss: fixed, or halved by an overflow and doubled after many steps without one.

    Attributes:
        scaler: holds the scale, for whoever goes backward or writes a checkpoint.

    Args:
        device: Where the loss is.
    """

    def __init__(self, device: torch.device) -> None:
        self.scaler = torch.amp.GradScaler(device.type, growth_interval=GROWTH_INTERVAL)
        self._is_dynamic = True
        self._least = 1.0

    def configure(self, loss_scale: float | str, init_scale: float, min_scale: float) -> None:
        """Sets the scale.

        Args:
            loss_scale: A number, or ``dynamic``.
            init_scale: The first one of a dynamic scale.
            min_scale: The least one of a dynamic scale.

        Raises:
            InputError: a number is not above zero, or `loss_scale` is another word.
        """
        self._is_dynamic = loss_scale == "dynamic"
        if not self._is_dynamic and (isinstance(loss_scale, str | bool) or not isinstance(loss_scale, int | float)):
            raise InputError(f"loss_scale is {loss_scale!r}; expected a number, or 'dynamic'.")
        first = init_scale if self._is_dynamic else float(loss_scale)
        if not (first > 0 and min_scale > 0):
            raise InputError(f"A loss scale is above zero: got {first!r}, at least {min_scale!r}.")
        self._least = float(min_scale)
        self._set(float(first), 0)

    @property
    def value(self) -> float:
        """The scale."""
        return float(self.scaler.get_scale())

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns the loss times the scale."""
        return loss * self.value

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divides the gradients of this rank by the scale; infinite ones and NaN stay what they are."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            foreach_mul_(gradients, 1.0 / self.value)

    def update(self, has_overflow: bool) -> None:
        """Follows a step, with what all ranks have found together."""
        if not self._is_dynamic:
            return
        num_good = 0 if has_overflow else self.scaler.state_dict()["_growth_tracker"] + 1
        if has_overflow:
            self._set(max(self.value / 2, self._least), 0)
        elif num_good >= GROWTH_INTERVAL:
            self._set(self.value * 2, 0)
        else:
            self._set(self.value, num_good)

    def _set(self, scale: float, num_good: int) -> None:
        self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale, "_growth_tracker": num_good})


Gradients = Sequence[tuple[nn.Parameter, Tensor]]


@dataclass(frozen=True)
class Finished:
    """What is known of the gradients of a step.

    Attributes:
        has_overflow: whether one of them is not finite, on any rank.
        norm: of all of them, before clipping; None: nobody asked.
    """

    has_overflow: bool = False
    norm: float | None = None


def put_aside(parameters: Iterable[nn.Parameter]) -> Gradients:
    """Takes gradients that are not scaled out of the way of those that will be; returns them."""
    held = [(each, each.grad) for each in parameters if each.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    return held


def finish(
    model: AutoVaruna,
    parameters: Sequence[nn.Parameter],
    scale: StepScale | None,
    earlier: Gradients,
    max_norm: float | None,
) -> Finished:
    """Unscales gradients, adds those of earlier steps, and clips them. Collective.

    Args:
        model: The model.
        parameters: Those of this rank.
        scale: Of the loss; it follows what overflows. None: there is none.
        earlier: What `put_aside` returned.
        max_norm: Most that the norm of all gradients may be; None: anything.
    """
    if scale is None:
        return Finished(norm=None if max_norm is None else model.clip_grad_norm_(max_norm).item())
    scale.unscale(parameters)
    for parameter, gradient in earlier:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    norm = model.clip_grad_norm_(math.inf if max_norm is None else max_norm).item()
    has_overflow = not math.isfinite(norm)
    scale.update(has_overflow)
    return Finished(has_overflow, norm)


def mean_loss(model: AutoVaruna, inputs: Inputs, batch_size: int, leaders: Sequence[int], world: World) -> float:
    """Returns the mean loss over the samples of all replicas, in eval mode, on every rank. Collective.

    Args:
        model: The wrapped model.
        inputs: This replica's samples.
        batch_size: Most samples that are on their way at once, over all replicas.
        leaders: One rank of each replica.
        world: The ranks.

    Raises:
        InputError: no rank has a sample.
    """
    own = on_all(world, lambda: describe(model.module, (), inputs)[1].batch_size, "reading the inputs to evaluate")
    sizes = world.gather_objects(own, "evaluating")
    if not sum(sizes[rank] for rank in leaders):
        raise InputError("evaluate() got no sample on any rank; expected at least one.")
    num_parts = math.ceil(max(sizes) / math.ceil(batch_size / len(leaders)))
    total, num_samples = 0.0, 0
    with _evaluating(model.module), torch.no_grad():
        for place in range(num_parts):
            bounds = [(size * place // num_parts, size * (place + 1) // num_parts) for size in sizes]
            count = sum(bounds[rank][1] - bounds[rank][0] for rank in leaders)
            if count:
                total += count * loss_of(model(**rows_of(inputs, own, *bounds[world.rank]))).item()
                num_samples += count
    return total / num_samples


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Sets eval mode on every module; afterwards each is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
