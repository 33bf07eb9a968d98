"""Handles what a forward leaves in its modules besides outputs: puts it back, warns of it, or keeps it for later calls.

Plain PyTorch's first call may fill a cache, a table of positions or a mask with its length, which later calls read; a
trace of the first one would fill it each time. So two copies of the model make the first call, on different samples,
and what both leave alike is put into the model, which is then traced anew. What is measured leaves nothing at all.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna._torch import FakeTensor
from autovaruna.graph.call import CallSpec
from autovaruna.graph.export.constant_values import is_known
from autovaruna.graph.export.errors import warn_once
from autovaruna.graph.guards import OF_MODULES, entries, full_name, hooks_of, is_plain, records
from autovaruna.graph.precision import in_precision
from autovaruna.graph.random import own_cache, python_generators, untouched_generator
from autovaruna.graph.tree import flatten

logger = logging.getLogger(__name__)
_CONTAINERS = (list, dict, set)
_BUFFERS, _PASSING = "_buffers", "_non_persistent_buffers_set"
_SEED = 0
_MOST_NAMES = 5

Place = tuple[str, str, str]
"""The path of a module, the table that something is in, and its name there; attributes are in none."""


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


def left_tensors(model: nn.Module) -> list[str]:
    """Returns where the model's forward, which has just been traced, has left tensors; those of constants apart."""
    return list(dict.fromkeys(name for name, values in _attributes(model) if any(map(_is_left, values))))


def warn_of_left(names: Sequence[str], model: nn.Module) -> None:
    """Warns of tensors that plain PyTorch would have beside what the model returns, and ranks have not."""
    if names:
        text = (
            f"forward leaves tensors in {', '.join(names[:_MOST_NAMES])}{' and more' * (len(names) > _MOST_NAMES)}. "
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
    return isinstance(value, FakeTensor) and not isinstance(value, nn.Parameter) and not is_known(value)


class _UnsettledError(Exception):
    """Says that calls differ by more than what the first one leaves."""


def settle(model: nn.Module, call: CallSpec, samples: Sequence[Sequence[Tensor]], device: torch.device) -> bool:
    """Gives a model what its first call leaves in its modules; returns whether that was possible.

    Args:
        model: The model, all of whose numbers are on `device`.
        call: The call.
        samples: Samples for a first call, and others for another.
        device: Where the model runs.
    """
    try:
        first, second = (_left(model, call, each, device) for each in samples)
        found = _common(first, second)
    except Exception:  # whatever it is, the trace has said why the model cannot be traced as it is
        return False
    for (path, table, name), value in found.items():
        _put(model.get_submodule(path), table, name, value)
    return bool(found)


def _left(model: nn.Module, call: CallSpec, tensors: Sequence[Tensor], device: torch.device) -> dict[Place, Any]:
    """Returns what a first call leaves, and a second one leaves as it is."""
    own = copy.deepcopy(model, {id(each): each for each in hooks_of(model)})
    returned = _called(own, call, tensors, device)
    once = {place: copy.copy(value) if is_plain(value) else value.clone() for place, value in _held(own)}
    if not _same(returned, _called(own, call, tensors, device)):
        raise _UnsettledError
    before, twice = dict(_held(model)), dict(_held(own))
    again = {place for place, value in twice.items() if not _same(value, once.get(place))}
    if any(is_plain(twice[place]) or not _is_alike(twice[place], before.get(place)) for place in again):
        raise _UnsettledError
    return {place: value for place, value in once.items() if place not in again and not _same(value, before.get(place))}


def _called(own: nn.Module, call: CallSpec, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    pairs = zip(tensors, call.inputs, strict=True)
    inputs = [each.detach().clone().requires_grad_(spec.needs_gradient) for each, spec in pairs]
    args, kwargs = call.arguments(inputs)
    with untouched_generator(device), python_generators(_SEED), in_precision(call.precision):
        torch.manual_seed(_SEED)
        outputs, _ = flatten(call.of(own)(*args, **kwargs), "output")
    return [each.detach() for each in outputs]


def _common(first: dict[Place, Any], second: dict[Place, Any]) -> dict[Place, Any]:
    """Returns what both calls leave; tensors in attributes that follow from inputs are left out."""
    differing = {place for place in first.keys() | second.keys() if not _same(first.get(place), second.get(place))}
    if any(place[1] or is_plain(first.get(place)) for place in differing):
        raise _UnsettledError
    found = {place: value for place, value in first.items() if place not in differing}
    if any(isinstance(each, Tensor) and each.requires_grad for each in found.values()):
        raise _UnsettledError
    return found


def _held(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    """Yields the buffers of a model, and the numbers, texts and tensors that are attributes of its modules."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OF_MODULES and (is_plain(value) or isinstance(value, Tensor)):
                yield (path, "", name), value
        yield from (((path, _BUFFERS, name), buffer) for name, buffer in module._buffers.items())
        yield from (((path, _PASSING, name), True) for name in module._non_persistent_buffers_set)


def _put(module: nn.Module, table: str, name: str, value: Any) -> None:
    if table == _BUFFERS:
        module._buffers[name] = value
    elif table == _PASSING:
        module._non_persistent_buffers_set.add(name)
    else:
        setattr(module, name, value)


def _is_alike(one: Any, other: Any) -> bool:
    are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return are_tensors and one.shape == other.shape and one.dtype == other.dtype


def _same(one: Any, other: Any) -> bool:
    """Whether two values, or the values in two lists, are the same to the bit."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _is_alike(one, other) and torch.equal(one, other)
    return is_plain(one) and is_plain(other) and type(one) is type(other) and one == other


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
