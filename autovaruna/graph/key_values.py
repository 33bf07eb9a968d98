"""Defines `KeptTensor`: keys or values of a transformers cache, which stay on the stages that made them.

A call without gradients that is given such a cache returns it filled, as plain PyTorch does. What the caller has of its
tensors are their shapes; the next call that is given the cache finds the numbers on the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autovaruna._torch import DisableTorchFunctionSubclass, pytree
from autovaruna.errors import InputError

_LAYER = {"keys", "values", "dtype", "device", "is_initialized"}
_OF_SHAPE = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.is_complex}
    | {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")}
    | {getattr(Tensor, name).__get__ for name in ("is_leaf", "grad_fn", "grad", "is_cpu", "is_cuda", "is_meta")}
)


def is_cache(value: object) -> bool:
    """Whether an object is a key-value cache of transformers, or a layer of one."""
    return any(each.__module__ == "transformers.cache_utils" for each in type(value).__mro__)


def refuse_other_layers(value: Any) -> None:
    """Refuses a cache whose layers have more than keys and values that grow: each length would ask for a trace."""
    layers = getattr(value, "layers", None) if not hasattr(value, "keys") else [value]
    if layers is None or any(vars(each).keys() - _LAYER for each in layers):
        got = type(value).__name__ if layers is None else ", ".join(sorted({type(each).__name__ for each in layers}))
        raise InputError(
            f"The key-value cache of the call is of another kind than stages can keep: got {got}, expected a "
            "DynamicCache of DynamicLayer. Pass use_cache=False, which computes all tokens again for each new one."
        )


@dataclass(frozen=True)
class Kept:
    """Where the numbers of a tensor are.

    Attributes:
        model: what the stages are of.
        stage: the one that made it.
        batch: the micro-batches of the call that made it, by number.
        parts: those that this rank has.
    """

    model: object
    stage: int
    batch: Mapping[int, object]
    parts: dict[int, Tensor]

    def is_of(self, model: object, batch: Mapping[int, object]) -> bool:
        return self.model is model and self.batch == batch


def kept_of(tensors: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Kept]:
    """Returns where the numbers of some tensors are, which stages have kept."""
    return {name: each.kept for name in names if isinstance(each := tensors[name], KeptTensor)}


class KeptTensor(Tensor):
    """A tensor of this rank's samples whose numbers are on the stages; see the head of this file."""

    kept: Kept

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, kept: Kept) -> KeptTensor:
        made = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)
        made.kept = kept
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Tells shapes; InputError for what asks for numbers."""
        if func in _OF_SHAPE:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise InputError(
            f"The keys and values of a cache stay on the stages that made them: got {getattr(func, '__name__', func)} "
            "of one. Expected the cache in the next call of the model alone; pass use_cache=False for beams, assisted "
            "generation, and whatever else changes a cache, which computes all tokens again for each new one."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"KeptTensor{tuple(self.shape)}"


def fill_given(given: Any, made: Any) -> None:
    """Has caches that a call was given be those that it returned: a change of either is one of both."""
    olds, news = ([each for each in pytree.tree_leaves(value) if is_cache(each)] for value in (given, made))
    for old, new in zip(olds, news, strict=False):
        vars(old).update(vars(new))
        object.__setattr__(new, "__dict__", vars(old))
