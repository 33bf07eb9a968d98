"""Puts back what a model's modules, and the objects that they hold, held before it was run on fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from autovaruna.graph.own_cache import own_cache
from autovaruna.graph.watching.held import records


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Puts back the attributes of modules and of their objects when the context ends; new ones are taken away.

    A model that is run on fake tensors may keep some of them, or note that it has made what it keeps. It has a cache of
    its own for what `parametrize.cached()` keeps.
    """
    owners = [*model.modules(), *(each for _, each in records(model))]
    before = [(vars(owner), dict(vars(owner))) for owner in owners]
    contents = [(value, copy.copy(value)) for _, own in before for value in own.values() if type(value) in _CONTAINERS]
    try:
        with own_cache():
            yield
    finally:
        for place, own in before:
            _put_back(place, own)
        for value, content in contents:
            _fill(value, content)


_CONTAINERS = (list, dict, set)


def _put_back(place: dict[Any, Any], own: dict[Any, Any]) -> None:
    if any(place.get(name, place) is not value for name, value in own.items()) or len(place) != len(own):
        place.clear()
        place.update(own)


def _fill(value: Any, content: Any) -> None:
    if isinstance(value, list):
        value[:] = content
    elif isinstance(value, set) and value != content:
        value.clear()
        value.update(content)
    elif isinstance(value, dict):
        _put_back(value, content)
