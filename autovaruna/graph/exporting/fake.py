"""Swaps a model's tensors for fake ones, so that it can be traced without holding or touching its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.nn.parameter import is_lazy

from autovaruna.errors import TraceError


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """Returns a fake tensor of the same shape, strides and dtype that says it is on `device`."""
    with in_kernel_invocation_manager(mode):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, empty, device)


class TracingMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode of fake tensors that makes another of a fake parameter of its own in a tenth of the time.

    ``torch.export`` asks for one of each, and would take it apart as if it could be a view, or a subclass of tensors.
    """

    def from_tensor(self, tensor: Tensor, *, static_shapes: bool | None = None, **others: Any) -> FakeTensor:
        """Returns a fake tensor like another one."""
        is_own = isinstance(tensor, FakeTensor) and tensor.fake_mode is self and isinstance(tensor, nn.Parameter)
        if not (is_own and static_shapes):
            return super().from_tensor(tensor, static_shapes=static_shapes, **others)
        fake = self.fake_tensor_converter._get_memo(tensor)
        if fake is None:
            fake = _fake(tensor, self, tensor.device)
            self.fake_tensor_converter.set_tensor_memo(tensor, fake)
        return fake


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
    if isinstance(module, torch.jit.ScriptModule):
        module._c.setattr(name, tensor)
        return
    own: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    old = own[name]
    own[name] = tensor
    flat = module.__dict__.get("_flat_weights")
    if flat is not None:
        module.__dict__["_flat_weights"] = [tensor if weight is old else weight for weight in flat]
