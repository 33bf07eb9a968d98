"""Takes batches from the script's ``get_batch_fn``, and takes dictionaries of inputs apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna._torch import pytree
from autovaruna.errors import InputError
from autovaruna.graph.call import describe

Inputs = dict[str, Any]
GetBatch = Callable[..., Mapping[str, Any]]


def sample_batch(get_batch_fn: GetBatch, model: nn.Module, size: int, device: torch.device) -> Inputs:
    """Returns a batch of `size` samples on a device; one of another size is repeated or cut.

    Args:
        get_batch_fn: Takes a size, and ``device=`` if it likes; returns the model's keyword arguments.
        model: The model.
        size: Samples wanted.
        device: Where.

    Raises:
        InputError: it is no function, or returns no dictionary.
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
    return {name: _take(value, rows, spec.batch_size) for name, value in inputs.items()}


def check_inputs(inputs: object, who: str) -> Inputs:
    """Returns the inputs.

    Raises:
        InputError: they are no dictionary of keyword arguments.
    """
    if not isinstance(inputs, Mapping) or not all(isinstance(name, str) for name in inputs):
        raise InputError(
            f"{who} a {type(inputs).__name__}: expected a dictionary of the model's keyword arguments, as "
            "{'input_ids': tokens, 'labels': labels}."
        )
    return dict(inputs)


def on_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Returns the inputs with their tensors on a device; nested ones too."""
    return {name: _move(value, device) for name, value in inputs.items()}


def rows_of(inputs: Inputs, size: int, start: int, stop: int) -> Inputs:
    """Returns the samples from `start` to `stop` of a batch of `size`; what is no batch stays whole."""

    def cut(value: Any) -> Any:
        return value[start:stop] if isinstance(value, Tensor) and value.dim() and value.shape[0] == size else value

    return {name: pytree.tree_map(cut, value) for name, value in inputs.items()}


def _move(value: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def _take(value: Any, rows: Tensor, size: int) -> Any:
    def take(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else leaf

    return pytree.tree_map(take, value)


def loss_of(output: Any) -> Tensor:
    """Returns the scalar loss in what a model returned.

    Raises:
        InputError: there is none.
    """
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
