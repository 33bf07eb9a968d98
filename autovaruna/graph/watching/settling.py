"""Gives a model what its first call leaves for all later ones: tables of positions, masks, and how long they are.

Plain PyTorch's first call fills such a cache, and later calls read it; a trace of the first one would fill it each
time. So the first call is made, by a copy, and what it leaves is put into the model, if it follows from no numbers of
the inputs, and a second call leaves it as it is and returns the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.graph.call import CallSpec
from autovaruna.graph.precision import in_precision
from autovaruna.graph.random import python_generators, untouched_generator
from autovaruna.graph.tree import flatten
from autovaruna.graph.watching.held import is_plain
from autovaruna.graph.watching.hidden_state import untouched_globals

_SEED = 0
_OF_MODULES = frozenset(vars(nn.Module()))
_NOTHING = object()

_BUFFERS, _PASSING = "_buffers", "_non_persistent_buffers_set"

Place = tuple[str, str, str]
"""The path of a module, the table that something is in, and its name there; attributes are in none."""


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
    own = copy.deepcopy(model)
    returned = _called(own, call, tensors, device)
    once = {place: _copy_of(value) for place, value in _held(own)}
    if not _same(returned, _called(own, call, tensors, device)) or not _same(
        [*model.parameters()], [*own.parameters()]
    ):
        raise _UnsettledError
    before, twice = dict(_held(model)), dict(_held(own))
    again = {place for place, value in twice.items() if not _same(value, once.get(place, _NOTHING))}
    if any(is_plain(twice[place]) or not _is_alike(twice[place], before.get(place)) for place in again):
        raise _UnsettledError
    return {
        place: value
        for place, value in once.items()
        if place not in again and not _same(value, before.get(place, _NOTHING))
    }


def _called(own: nn.Module, call: CallSpec, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    pairs = zip(tensors, call.inputs, strict=True)
    inputs = [each.detach().clone().requires_grad_(spec.needs_gradient) for each, spec in pairs]
    args, kwargs = call.tree.unflatten(inputs)
    with untouched_generator(device), python_generators(_SEED), untouched_globals(own), in_precision(call.precision):
        torch.manual_seed(_SEED)
        outputs, _ = flatten(own(*args, **kwargs), "output")
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
            if name not in _OF_MODULES and (is_plain(value) or isinstance(value, Tensor)):
                yield (path, "", name), value
        for name, buffer in module._buffers.items():
            yield (path, _BUFFERS, name), buffer
        for name in module._non_persistent_buffers_set:
            yield (path, _PASSING, name), True


def _put(module: nn.Module, table: str, name: str, value: Any) -> None:
    if table == _BUFFERS:
        module._buffers[name] = value
    elif table == _PASSING:
        module._non_persistent_buffers_set.add(name)
    else:
        setattr(module, name, value)


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


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
