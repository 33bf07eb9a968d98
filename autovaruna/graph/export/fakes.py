"""Swaps a model's tensors for fake ones, so that it can be traced without holding or touching its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autovaruna._torch import FakeTensor, FakeTensorMode, in_kernel_invocation
from autovaruna.errors import TraceError
from autovaruna.graph.call import CallSpec


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """Returns a fake tensor of the same shape, strides and dtype that says it is on `device`."""
    with in_kernel_invocation(mode):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, empty, device)


@contextmanager
def faked(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Makes every parameter and buffer of `model` fake while the context lasts.

    Ties stay ties: one tensor under two names becomes one fake tensor under both. Parameters that this rank does
    not hold (they are on ``meta``) are traced like the others.

    Args:
        model: The model; the same objects are back in place afterwards.
        mode: The mode that the fake tensors belong to.
        device: Where they say they are.

    Raises:
        TraceError: a lazy parameter has no shape yet.
    """
    swapped: list[tuple[nn.Module, str, Tensor]] = []
    memo: dict[int, Tensor] = {}
    try:
        for path, module in model.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                if is_lazy(tensor):
                    raise TraceError(
                        f"{f'{path}.{name}'.removeprefix('.')} has no shape yet: got a lazy parameter. Expected an "
                        "initialised one; run one batch through the model before wrapping it."
                    )
                swapped.append((module, name, tensor))
                put(module, name, memo.setdefault(id(tensor), _fake(tensor, mode, device)))
        yield
    finally:
        for module, name, tensor in swapped:
            put(module, name, tensor)


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    fake: Any = fake_like(tensor, mode, device)
    if isinstance(tensor, nn.Parameter):  # as nn.Parameter marks them, without the copy that it makes
        fake.requires_grad_(tensor.requires_grad)._is_param = True
    return fake  # type: ignore[no-any-return]


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts another tensor in the place of a parameter or buffer, and in the list that recurrent modules keep."""
    own: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    old = own[name]
    own[name] = tensor
    flat = module.__dict__.get("_flat_weights")
    if flat is not None:
        module.__dict__["_flat_weights"] = [tensor if weight is old else weight for weight in flat]


def example_inputs(call: CallSpec, batch_size: int, mode: FakeTensorMode, device: torch.device) -> list[Tensor]:
    """Returns fake tensors for the inputs of `call` with another batch size."""
    with mode:
        return [
            torch.empty(
                (batch_size, *spec.shape[1:]) if spec.is_batch else spec.shape, dtype=spec.dtype, device=device
            ).requires_grad_(spec.needs_gradient)
            for spec in call.inputs
        ]
