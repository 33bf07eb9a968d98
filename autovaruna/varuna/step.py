"""Takes a step in Varuna's way: its batch and loss, the scale of the loss, gradients that overflow or are clipped."""

from __future__ import annotations

import inspect
import math
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna._torch import foreach_mul_, pytree
from autovaruna.api import AutoVaruna
from autovaruna.errors import InputError
from autovaruna.graph.call import describe
from autovaruna.interception.ending import script_handler
from autovaruna.ranks.world import World, on_all
from autovaruna.session.session import all_in_mode

Inputs = dict[str, Any]
GetBatch = Callable[..., Mapping[str, Any]]
GROWTH_INTERVAL = 2000  # steps without an overflow after which the scale doubles


def sample_batch(get_batch_fn: GetBatch, model: nn.Module, size: int, device: torch.device) -> Inputs:
    """Returns a batch of `size` samples on a device; one of another size is repeated or cut.

    `get_batch_fn` takes a size, and ``device=`` if it likes, and returns the model's keyword arguments; InputError if
    it is no function, or returns no dictionary.
    """
    if not callable(get_batch_fn):
        raise InputError(
            f"get_batch_fn is {get_batch_fn!r}; expected a function that takes a number of samples and returns as many."
        )
    takes_device = "device" in inspect.signature(get_batch_fn).parameters
    batch = get_batch_fn(size, device=torch.device("cpu")) if takes_device else get_batch_fn(size)
    inputs = on_device(check_inputs(batch, "get_batch_fn returns"), device)
    spec = describe(model, (), inputs)[1]
    if spec.batch_size in (0, size):
        return inputs
    rows = torch.arange(size, device=device) % spec.batch_size
    return rows_of(inputs, spec.batch_size, rows)


def check_inputs(inputs: object, who: str) -> Inputs:
    """Returns the inputs; InputError if they are no dictionary of keyword arguments."""
    if not isinstance(inputs, Mapping) or not all(isinstance(name, str) for name in inputs):
        raise InputError(
            f"{who} a {type(inputs).__name__}: expected a dictionary of the model's keyword arguments, as "
            "{'input_ids': tokens, 'labels': labels}."
        )
    return dict(inputs)


def on_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Returns the inputs with their tensors on a device; nested ones too."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)  # type: ignore[no-any-return]


def rows_of(inputs: Inputs, size: int, rows: slice | Tensor) -> Inputs:
    """Returns some samples of a batch of `size`; what is no batch stays whole."""

    def part_of(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.dim() and tensor.shape[0] == size else tensor

    return pytree.tree_map_only(Tensor, part_of, inputs)  # type: ignore[no-any-return]


def loss_of(output: Any) -> Tensor:
    """Returns the scalar loss in what a model returned; InputError if there is none."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, tuple | list):
        output = output[0] if output else None
    else:
        output = getattr(output, "loss", output)
    if isinstance(output, Tensor) and output.numel() == 1:
        return output.reshape(())
    raise InputError(
        f"Varuna trains a model that returns its loss: got {type(output).__name__}"
        f"{f' of shape {tuple(output.shape)}' if isinstance(output, Tensor) else ''}. Expected a tensor with one "
        "number, alone, first of a tuple, or under the name loss."
    )


class JobSignals:
    """The signals of a job; `before` is called before the script's handler, which may end the process."""

    def __init__(self, world: World, before: Callable[[], None]) -> None:
        self._world = world
        self._before = before
        self._num_heard = 0
        self._num_handled = 0
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def install(self) -> None:
        """Puts the script's handler aside, if it has one."""
        if threading.current_thread() is not threading.main_thread():
            return
        handler = script_handler(signal.SIGUSR1)
        if callable(handler) and handler != self._record:
            self._handler = handler
            signal.signal(signal.SIGUSR1, self._record)

    def handle(self) -> None:
        """Calls the script's handler if a signal has come to any rank. Collective."""
        self.install()
        most = max(self._world.gather_objects(self._num_heard, "looking for signals"))
        if most > self._num_handled:
            self._num_handled = most
            if self._handler is not None:
                self._before()
                self._handler(signal.SIGUSR1, None)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._num_heard += 1


class StepScale:
    """The scale of the loss: fixed, or halved by an overflow and doubled after many steps without one."""

    def __init__(self, device: torch.device) -> None:
        self.scaler = torch.amp.GradScaler(device.type, growth_interval=GROWTH_INTERVAL)
        self._is_dynamic = True
        self._least = 1.0

    def configure(self, loss_scale: float | str, init_scale: float, min_scale: float) -> None:
        """Sets the scale; InputError if a number is not above zero, or `loss_scale` is another word."""
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


def pop_gradients(parameters: Iterable[nn.Parameter]) -> Gradients:
    """Removes gradients, which are not scaled, before scaled ones are added; returns them."""
    held = [(each, each.grad) for each in parameters if each.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    return held


def finish_gradients(
    model: AutoVaruna,
    parameters: Sequence[nn.Parameter],
    scale: StepScale | None,
    earlier: Gradients,
    max_norm: float | None,
) -> tuple[float | None, bool]:
    """Unscales gradients, adds those of earlier steps, and clips them. Collective.

    Returns the norm of all gradients before clipping (None: nobody asked), and whether one is not finite, on any rank.
    """
    if scale is None:
        return None if max_norm is None else model.clip_grad_norm_(max_norm).item(), False
    scale.unscale(parameters)
    for parameter, gradient in earlier:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    norm = model.clip_grad_norm_(math.inf if max_norm is None else max_norm).item()
    has_overflow = not math.isfinite(norm)
    scale.update(has_overflow)
    return norm, has_overflow


def mean_loss(model: AutoVaruna, inputs: Inputs, batch_size: int, leaders: Sequence[int], world: World) -> float:
    """Returns the mean loss over the samples of all replicas, in eval mode, on every rank. Collective."""
    own = on_all(world, lambda: describe(model.module, (), inputs)[1].batch_size, "reading the inputs to evaluate")
    sizes = world.gather_objects(own, "evaluating")
    if not sum(sizes[rank] for rank in leaders):
        raise InputError("evaluate() got no sample on any rank; expected at least one.")
    num_parts = math.ceil(max(sizes) / math.ceil(batch_size / len(leaders)))
    total, num_samples = 0.0, 0
    with all_in_mode(model.module, is_training=False), torch.no_grad():
        for place in range(num_parts):
            bounds = [(size * place // num_parts, size * (place + 1) // num_parts) for size in sizes]
            count = sum(bounds[rank][1] - bounds[rank][0] for rank in leaders)
            if count:
                total += count * loss_of(model(**rows_of(inputs, own, slice(*bounds[world.rank])))).item()
                num_samples += count
    return total / num_samples
