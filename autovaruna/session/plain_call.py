"""Calls a model as it is, on one process that needs no plan, and counts its steps for `Metrics`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from autovaruna.graph.facts import tensors_in
from autovaruna.runtime.metrics import Subject
from autovaruna.session.memory import HeldMemory
from autovaruna.session.record import start_record
from autovaruna.session.run import Run
from autovaruna.session.shared_call import tokens_of


class PlainCalls:
    """The calls of a model on one process."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        self._model, self._run = model, run
        self._is_followed = False

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the model; a backward from what it returns is a step."""
        run, began = self._run, perf_counter()
        run.num_calls += 1
        if not torch.is_grad_enabled():
            return self._model(*args, **kwargs)
        if not self._is_followed:
            self._is_followed, model = True, self._model
            device = next((each.device for each in model.parameters()), torch.device("cpu"))
            run.metrics.follow(Subject(parameters=WeakMethod(model.parameters), memory=HeldMemory(device, model)))
            start_record(run, type(model).__name__)
            began = perf_counter()
        run.metrics.begin_call(began, *self._size(args, kwargs))
        returned = self._model(*args, **kwargs)
        self._watch(returned)
        return returned

    def _size(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Returns how many samples a call has, and tokens."""
        dimensions, named = dict(self._run.settings.batch_dims), dict[str, Any](all=(args, kwargs))
        if dimensions:
            named = inspect.signature(self._model.forward).bind(*args, **kwargs).arguments
        shapes = []
        for name, value in named.items():
            for tensor in tensors_in(value):
                shape, place = list(tensor.shape), dimensions.get(name, 0)
                if len(shape) > place:
                    shapes.append(((shape.pop(place), *shape), tensor.dtype))
        samples = shapes[0][0][0] if shapes else 0
        return samples, samples * tokens_of(shape for shape in shapes if shape[0][0] == samples)

    def _watch(self, returned: Any) -> None:
        """Records a step once a backward reaches the loss among what a call returned, or else any of it."""
        number, metrics, loss = self._run.num_calls, self._run.metrics, _loss_in(returned)
        value = None if loss is None else loss.detach().clone()  # the script may scale it in place

        def record(_: Any) -> None:
            metrics.record(number, value, lambda: "the loss is not finite", is_loss=value is not None)

        for each in [loss] if loss is not None else _with_gradient(returned):
            assert each.grad_fn is not None
            each.grad_fn.register_prehook(record)


def _with_gradient(returned: Any) -> Iterator[Tensor]:
    values = [*returned.values()] if isinstance(returned, Mapping) else returned
    return (each for each in tensors_in(values) if each.grad_fn is not None)


def _loss_in(returned: Any) -> Tensor | None:
    """Returns what is called the loss, or the only number with a gradient; None: there is neither."""
    named = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    if isinstance(named, Tensor) and named.numel() == 1 and named.grad_fn is not None:
        return named
    numbers = [each for each in _with_gradient(returned) if each.dim() == 0]
    return numbers[0] if len(numbers) == 1 else None
