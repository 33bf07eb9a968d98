"""Makes fake tensors, which have no numbers: for the parameters, buffers and inputs of a model that runs on them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.parameter import is_lazy

from autovaruna._torch import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation,
    replaced,
)
from autovaruna.errors import TraceError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.guards import restored
from autovaruna.graph.module_state import put

logger = logging.getLogger(__name__)


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """Returns a fake tensor of the same shape, strides and dtype that says it is on `device`."""
    with in_kernel_invocation(mode):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, empty, device)


@contextmanager
def faked(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Makes every parameter and buffer of `model` fake while the context lasts; tied ones stay tied.

    Parameters that this rank does not hold (they are on ``meta``) are traced like the others.
    """
    memo: dict[int, Tensor] = {}
    tables = [table for module in model.modules() for table in (vars(module), module._parameters, module._buffers)]
    with restored(tables):
        for path, module in model.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                if is_lazy(tensor):
                    raise TraceError(
                        f"{f'{path}.{name}'.removeprefix('.')} has no shape yet: got a lazy parameter. Expected an "
                        "initialised one; run one batch through the model before wrapping it."
                    )
                put(module, name, memo.setdefault(id(tensor), _fake(tensor, mode, device)))
        yield


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    fake: Any = fake_like(tensor, mode, device)
    if isinstance(tensor, nn.Parameter):  # as nn.Parameter marks them, without the copy that it makes
        fake.requires_grad_(tensor.requires_grad)._is_param = True
    return fake  # type: ignore[no-any-return]


def example_inputs(call: CallSpec, batch_size: int, mode: FakeTensorMode, device: torch.device) -> list[Tensor]:
    """Returns fake tensors for the inputs of `call` with another batch size."""
    with mode:
        return [
            torch.empty(
                (batch_size, *spec.shape[1:]) if spec.is_batch else spec.shape, dtype=spec.dtype, device=device
            ).requires_grad_(spec.needs_gradient)
            for spec in call.inputs
        ]


@contextmanager
def without_cudnn() -> Iterator[bool]:
    """Turns cuDNN off while fake tensors are computed with; yields whether it was on.

    It would draw the state of a recurrent layer's dropout, and keep that, without numbers, for the whole process.
    """
    before = bool(torch.backends.cudnn.enabled)
    torch.backends.cudnn.enabled = False
    try:
        yield before
    finally:
        torch.backends.cudnn.enabled = before


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Has distributions take their parameters as they are: to check them takes numbers."""
    with replaced(Distribution, "_validate_args", False):
        yield
