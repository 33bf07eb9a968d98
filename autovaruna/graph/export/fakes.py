"""Runs models on fake tensors: a model's own are swapped for some without numbers, and methods are tried out.

What a forward leaves in its modules besides outputs is put back, or warned of.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import local
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy

from autovaruna._torch import FakeTensor, FakeTensorMode, in_kernel_invocation
from autovaruna.errors import TraceError
from autovaruna.graph.call import CallSpec, UnfamiliarError, outline
from autovaruna.graph.export.constant_values import is_known
from autovaruna.graph.export.errors import quiet_failure, warn_once
from autovaruna.graph.guards import OF_MODULES, Guards, entries, full_name, is_plain, records
from autovaruna.graph.precision import compiling_nothing
from autovaruna.graph.random import own_cache
from autovaruna.graph.tree import flatten


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """Returns a fake tensor of the same shape, strides and dtype that says it is on `device`."""
    with in_kernel_invocation(mode):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, empty, device)


@contextmanager
def faked(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Makes every parameter and buffer of `model` fake while the context lasts; tied ones stay tied.

    Parameters that this rank does not hold (they are on ``meta``) are traced like the others.

    Raises:
        TraceError: a lazy parameter has no shape yet.
    """
    swapped: list[tuple[nn.Module, str, Tensor]] = []
    memo: dict[int, Tensor] = {}
    try:
        for path, module in model.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                if is_lazy(tensor):
                    raise TraceError(
                        f"{f'{path}.{name}'.removeprefix('.')} has no shape yet: got a lazy parameter. Expected an "
                        "initialised one; run one batch through the model before wrapping it."
                    )
                swapped.append((module, name, tensor))
                put(module, name, memo.setdefault(id(tensor), _fake(tensor, mode, device)))
        yield
    finally:
        for module, name, tensor in swapped:
            put(module, name, tensor)


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    fake: Any = fake_like(tensor, mode, device)
    if isinstance(tensor, nn.Parameter):  # as nn.Parameter marks them, without the copy that it makes
        fake.requires_grad_(tensor.requires_grad)._is_param = True
    return fake  # type: ignore[no-any-return]


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts another tensor in the place of a parameter or buffer, and in the list that recurrent modules keep."""
    own: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    old = own[name]
    own[name] = tensor
    flat = module.__dict__.get("_flat_weights")
    if flat is not None:
        module.__dict__["_flat_weights"] = [tensor if weight is old else weight for weight in flat]


def example_inputs(call: CallSpec, batch_size: int, mode: FakeTensorMode, device: torch.device) -> list[Tensor]:
    """Returns fake tensors for the inputs of `call` with another batch size."""
    with mode:
        return [
            torch.empty(
                (batch_size, *spec.shape[1:]) if spec.is_batch else spec.shape, dtype=spec.dtype, device=device
            ).requires_grad_(spec.needs_gradient)
            for spec in call.inputs
        ]


_MOST_KNOWN = 64


def method_of(model: nn.Module, value: object, name: str) -> bool:
    """Whether an attribute is a method that the model's own class adds to those of every module."""
    is_public = not (name.startswith("_") or hasattr(nn.Module, name))
    return is_public and isinstance(value, MethodType) and value.__self__ is model


class OwnMethods:
    """Tells which calls of a model's methods return what follows from weights; it asks once for like calls."""

    def __init__(self, model: nn.Module, guards: Guards) -> None:
        self._model = model
        self._guards = guards
        self._known: dict[Hashable, bool] = {}
        self._snapshot: Any = None

    def follow_weights(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> bool:
        """Whether a call of a method returns tensors that have a gradient for weights, which compute on `device`."""
        find = partial(follows_weights, self._model, getattr(self._model, name), args, kwargs, device)
        snapshot = self._guards.snapshot()
        if snapshot != self._snapshot or len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._snapshot = snapshot
        try:
            kind = name, outline((tuple(args), dict(kwargs)), [])
        except UnfamiliarError:
            return find()
        if kind not in self._known:
            self._known[kind] = find()
        return self._known[kind]


def follows_weights(
    model: nn.Module, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> bool:
    """Whether a method returns tensors that have a gradient for weights; it runs on fake tensors and leaves nothing."""
    tensors, tree = flatten((tuple(args), dict(kwargs)))
    if not any(each.dim() for each in tensors):
        return False
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    try:
        with (
            unchecked_distributions(),
            quiet_failure(),
            as_before(model),
            compiling_nothing(),
            faked(model, mode, device),
            mode,
            torch.enable_grad(),
        ):
            fakes = [fake_like(each.detach(), mode, device) for each in tensors]
            own_args, own_kwargs = tree.unflatten(fakes)
            found, _ = flatten(method(*own_args, **own_kwargs))
            return any(isinstance(each, Tensor) and each.requires_grad for each in found)
    except Exception:  # it asks for numbers: no trace of it is possible
        return False


@contextmanager
def without_cudnn() -> Iterator[bool]:
    """Turns cuDNN off while fake tensors are computed with; yields whether it was on.

    It would draw the state of a recurrent layer's dropout, and keep that, without numbers, for the whole process.
    """
    before = bool(torch.backends.cudnn.enabled)
    torch.backends.cudnn.enabled = False
    try:
        yield before
    finally:
        torch.backends.cudnn.enabled = before


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Has distributions take their parameters as they are: to check them takes numbers."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


logger = logging.getLogger(__name__)
_CONTAINERS = (list, dict, set)
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
