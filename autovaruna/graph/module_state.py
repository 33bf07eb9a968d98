"""Finds the tensors of a module's state, and puts others in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from autovaruna._torch import FLAT_WEIGHTS, buffer_table, parameter_table


def replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts another tensor in the place of a parameter or buffer, and in the list that recurrent modules keep."""
    own: dict[str, Any] = parameter_table(module) if name in parameter_table(module) else buffer_table(module)
    old = own[name]
    own[name] = tensor
    flat = module.__dict__.get(FLAT_WEIGHTS)
    if flat is not None:
        module.__dict__[FLAT_WEIGHTS] = [tensor if weight is old else weight for weight in flat]


StatePlaces = tuple[tuple[tuple[nn.Module, str], ...], ...]
"""Where each tensor of a module's state is: the modules and attribute names that share it."""


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
