"""What a forward leaves in its modules besides outputs is put back, or warned of; what is measured leaves nothing."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autovaruna._torch import FakeTensor
from autovaruna.graph.export.constant_values import is_known
from autovaruna.graph.export.errors import warn_once
from autovaruna.graph.guards import OF_MODULES, entries, full_name, is_plain, records
from autovaruna.graph.random import own_cache

logger = logging.getLogger(__name__)
_CONTAINERS = (list, dict, OrderedDict, set)
_MOST_NAMES = 5


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Puts back the attributes of modules and of their objects when the context ends; new ones are taken away.

    A model that is run on fake tensors may keep some of them. What `parametrize.cached()` keeps is kept apart, too.
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


def changed_attributes(model: nn.Module, own: nn.Module) -> list[str]:
    """Returns the attributes of modules and objects that a forward of `own`, a copy of the model, has changed."""
    before, after = dict(_attributes(model)), dict(_attributes(own))
    return sorted(name for name in before | after if not _same(before.get(name), after.get(name)))


def _same(one: Any, other: Any) -> bool:
    """Whether two values, or the values in two lists, are the same to the bit."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return is_plain(one) and is_plain(other) and type(one) is type(other) and one == other


def left_tensors(model: nn.Module) -> list[str]:
    """Returns where a forward, just traced, has left tensors or numbers out of them; those of constants apart."""
    return list(dict.fromkeys(name for name, values in _attributes(model) if any(map(_is_left, values))))


def warn_of_left(names: Sequence[str], model: nn.Module) -> None:
    """Warns of what plain PyTorch would have beside what the model returns, and ranks have not."""
    if names:
        text = (
            f"forward leaves tensors, or numbers out of them (item()), in {', '.join(names[:_MOST_NAMES])}"
            f"{' and more' * (len(names) > _MOST_NAMES)}. "
            "They stay where they are made, on a rank and in a micro-batch: after a call nothing new is there. A loss "
            "must not be made of them outside of the model; return them if the script goes on from them."
        )
        warn_once(logger, model, text)


def _attributes(model: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """Yields what is in attributes of modules and their objects; torch's own modules keep weights that they make."""
    for path, owner in [*model.named_modules(), *records(model)]:
        for name, value in list(vars(owner).items()):
            if name not in OF_MODULES and not type(owner).__module__.startswith("torch."):
                yield full_name(path, name), [each for _, each in entries("", value, 2)]


def _is_left(value: Any) -> bool:
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return bool(free_unbacked_symbols(value))
    return isinstance(value, FakeTensor) and not isinstance(value, nn.Parameter) and not is_known(value)


_on_this_thread = local()


def is_profiling() -> bool:
    """Whether only time and memory count on this thread."""
    return bool(getattr(_on_this_thread, "is_rehearsal", False))


@contextmanager
def profiling_mode() -> Iterator[None]:
    """Lets copies stand in for modules that are kept whole, so that what is measured leaves no trace in the model."""
    before = is_profiling()
    _on_this_thread.is_rehearsal = True
    try:
        yield
    finally:
        _on_this_thread.is_rehearsal = before
