"""Finds the tensors of a module's state, and puts others in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts another tensor in the place of a parameter or buffer, and in the list that recurrent modules keep."""
    own: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    old = own[name]
    own[name] = tensor
    flat = module.__dict__.get("_flat_weights")
    if flat is not None:
        module.__dict__["_flat_weights"] = [tensor if weight is old else weight for weight in flat]


Places = tuple[tuple[tuple[nn.Module, str], ...], ...]
"""Where each tensor of a module's state is: the modules and attribute names that share it."""


def places_of(module: nn.Module) -> Places:
    """Returns where the tensors of a module's state are: parameters first, each once, in the order of their names."""
    found: dict[str, dict[int, list[tuple[nn.Module, str]]]] = {"_parameters": {}, "_buffers": {}}
    for each in module.modules():
        for kind, places in found.items():
            for name, tensor in getattr(each, kind).items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((each, name))
    return tuple(tuple(shared) for places in found.values() for shared in places.values())


@contextmanager
def with_state(places: Places, tensors: Sequence[Tensor]) -> Iterator[None]:
    own = [getattr(*shared[0]) for shared in places]
    try:
        for shared, tensor in zip(places, tensors, strict=True):
            for module, name in shared:
                put(module, name, tensor)
        yield
    finally:
        for shared, tensor in zip(places, own, strict=True):
            for module, name in shared:
                put(module, name, tensor)


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Returns the tensors of a module's state, in the order of `places_of`."""
    return [getattr(*shared[0]) for shared in places_of(module)]
