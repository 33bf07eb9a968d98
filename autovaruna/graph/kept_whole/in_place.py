"""Puts tensors in the place of a module's own, while it runs and while its functions go backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from autovaruna.graph.exporting.fake import put
from autovaruna.graph.kept_whole.held_weights import with_weights_in_backward

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
    """Puts tensors in the place of a module's own."""
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


@contextmanager
def in_place(places: Places, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Puts tensors in the place of a module's own, also where functions of its forward go backward later."""
    put_again = partial(with_state, places, tensors)
    with with_state(places, tensors), with_weights_in_backward(put_again):
        yield
