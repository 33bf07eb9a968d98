"""Finds the tensors of a module, and puts others in their place, such as fake ones, which have no numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.parameter import is_lazy

from autovaruna._torch import (
    FLAT_WEIGHTS,
    VALIDATES,
    FakeTensor,
    FakeTensorMode,
    buffer_table,
    in_kernel_invocation,
    parameter_table,
    replaced,
)
from autovaruna.errors import TraceError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.guards import attributes_of, restored

StatePlaces = tuple[tuple[tuple[nn.Module, str], ...], ...]
"""Where each tensor of a module's state is: the modules and attribute names that share it."""


def replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts another tensor in the place of a parameter or buffer, and in the list that recurrent modules keep."""
    own: dict[str, Any] = parameter_table(module) if name in parameter_table(module) else buffer_table(module)
    old = own[name]
    own[name] = tensor
    flat = module.__dict__.get(FLAT_WEIGHTS)
    if flat is not None:
        module.__dict__[FLAT_WEIGHTS] = [tensor if weight is old else weight for weight in flat]


def places_of(module: nn.Module) -> StatePlaces:
    """Returns where the tensors of a module's state are: parameters first, each once, in the order of their names."""
    found: list[tuple[tuple[nn.Module, str], ...]] = []
    for table in (parameter_table, buffer_table):
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for each in module.modules():
            for name, tensor in table(each).items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((each, name))
        found += map(tuple, places.values())
    return tuple(found)


@contextmanager
def with_state(places: StatePlaces, tensors: Sequence[Tensor]) -> Iterator[None]:
    own = [getattr(*shared[0]) for shared in places]
    try:
        for shared, tensor in zip(places, tensors, strict=True):
            for module, name in shared:
                replace_tensor(module, name, tensor)
        yield
    finally:
        for shared, tensor in zip(places, own, strict=True):
            for module, name in shared:
                replace_tensor(module, name, tensor)


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Returns the tensors of a module's state, in the order of `places_of`."""
    return [getattr(*shared[0]) for shared in places_of(module)]


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """Returns a fake tensor of the same shape, strides and dtype that says it is on `device`."""
    with in_kernel_invocation(mode):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, empty, device)


@contextmanager
def with_fake_state(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Makes every parameter and buffer of `model` fake while the context lasts; tied ones stay tied.

    Parameters that this rank does not hold (they are on ``meta``) are traced like the others.
    """
    memo: dict[int, Tensor] = {}
    tables = [
        table for module in model.modules() for table in (vars(module), parameter_table(module), buffer_table(module))
    ]
    with restored(tables):
        for path, module in model.named_modules():
            for name, tensor in [*parameter_table(module).items(), *buffer_table(module).items()]:
                if tensor is None:
                    continue
                if is_lazy(tensor):
                    raise TraceError(
                        f"{f'{path}.{name}'.removeprefix('.')} has no shape yet: got a lazy parameter. Expected an "
                        "initialised one; run one batch through the model before wrapping it."
                    )
                replace_tensor(module, name, memo.setdefault(id(tensor), _fake(tensor, mode, device)))
        yield


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    fake: Any = fake_like(tensor, mode, device)
    vars(fake).update(attributes_of(tensor))
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
    with replaced(Distribution, VALIDATES, False):
        yield
