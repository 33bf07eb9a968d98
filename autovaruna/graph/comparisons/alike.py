"""Lets two runs of a model draw the same random numbers, and measures what rounding does to one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autovaruna._torch import TorchDispatchMode, pytree
from autovaruna.graph.random import draw_from

_SUMS = ("mm", "conv", "attention", "sum", "mean", "var", "norm", "softmax", "linear", "rnn")


class DrawnAlike(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets each random operator draw numbers that follow from its name and arguments, whatever was drawn before.

    Tensors among them count by shape and dtype. The law of the numbers is the operator's own.

    Args:
        device: Whose default generator operators draw from; it is left in another state.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        if isinstance(given.get("generator"), torch.Generator):
            given["generator"] = None
        return draw_from(_seed(func, args, given), self._device, partial(func, *args, **given))


class Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes the results of sums (products, means, norms, ...) by as much as another order of summing may.

    Args:
        device: Where the model runs.
        seed: Of the changes.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator(device).manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.endswith("_") or not any(each in name for each in _SUMS):
            return result
        return pytree.tree_map_only(Tensor, self._rounded, result)

    def _rounded(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.device != self._generator.device:
            return tensor
        step = torch.finfo(tensor.dtype).eps
        noise = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float32, device=tensor.device)
        return tensor.mul_((1.0 + step * (2.0 * noise.double() - 1.0)).to(tensor.dtype))


def _seed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    leaves = pytree.tree_leaves((args, kwargs))
    words = [f"{tuple(each.shape)}{each.dtype}" if isinstance(each, Tensor) else repr(each) for each in leaves]
    digest = hashlib.blake2b(f"{func}{words}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
