"""Says how far apart numbers may be by rounding alone: for all that compares what must be the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from autovaruna._torch import TorchDispatchMode, pytree

SEEDS = (1, 2)
BY_ROUNDING = 16.0
"""A difference that is so many times what rounding does to the model itself is still one of rounding."""
CLEAR = 10.0
"""One that is so many times what is allowed is an error."""
_MOST = 0.03
"""In low precision that would be large: from here on what rounding does is measured."""
SMALL, SMALL_IN_LOW_PRECISION = 0.01, 0.3
"""A gradient that is less than this share of the largest is compared with that share: its terms may cancel out."""
_SUMS = ("mm", "conv", "attention", "sum", "mean", "var", "norm", "softmax", "linear", "rnn")
_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_TINY = 1e-30


def small_share(allowed: float) -> float:
    """Returns the share of the largest gradient with which one is compared that is less."""
    return SMALL if allowed < _MOST else SMALL_IN_LOW_PRECISION


def tolerance(values: Iterable[Any]) -> float:
    """Returns the relative difference that needs no explanation, by the coarsest dtype of tensors: 1e-5 for float32."""
    kinds = {each.dtype for each in values if isinstance(each, Tensor) and each.is_floating_point()}
    step: float = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    return 2.0 * math.pow(step, 0.75)


def clear_tolerance(values: Iterable[Any]) -> float:
    """Returns the relative difference from which on there is an error, unless rounding is measured and explains it."""
    return min(CLEAR * tolerance(values), _MOST)


def distance(one: Tensor, other: Tensor, least: float = 0.0) -> float:
    """Returns the greatest difference of two tensors over the greatest number in the second, or `least`."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return torch.inf
    if one.layout is not torch.strided or not one.numel() or torch.equal(one, other):
        return 0.0
    first, second = wide(one), wide(other)
    is_finite = second.isfinite()
    if not is_finite.all():
        if not torch.equal(first[~is_finite].nan_to_num(), second[~is_finite].nan_to_num()):
            return torch.inf
        first, second = first[is_finite], second[is_finite]
    off, largest = (float(each.abs().max()) if each.numel() else 0.0 for each in (first - second, second))
    return (off if math.isfinite(off) else torch.inf) / max(largest, least, _TINY)


def wide(tensor: Tensor) -> Tensor:
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return flat.detach().reshape(-1).to(torch.float32 if flat.dtype in _NARROW else torch.float64)


class Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes the results of sums (products, means, norms, ...) by as much as another order of summing may."""

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
