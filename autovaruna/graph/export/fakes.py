"""Runs models on fake tensors: a model's own are swapped for some without numbers, and methods are tried out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autovaruna._torch import OWN_CALL, FakeTensor, FakeTensorMode, in_kernel_invocation, replaced
from autovaruna.errors import TraceError
from autovaruna.graph.call import CallSpec, UnfamiliarError, outline
from autovaruna.graph.export.errors import quiet_failure
from autovaruna.graph.export.left_behind import as_before
from autovaruna.graph.guards import Guards
from autovaruna.graph.precision import compiling_nothing
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


@contextmanager
def own_calls(model: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Has calls of the model itself, as its methods make them, be those of `call`, in which they are as they were."""
    as_it_is = getattr(model, OWN_CALL)

    def call_once(*args: Any, **kwargs: Any) -> Any:
        with replaced(model, OWN_CALL, as_it_is):
            return call(*args, **kwargs)

    with replaced(model, OWN_CALL, call_once):
        yield


class OwnMethods:
    """Tells which calls of a model's methods return what follows from weights; it asks once for like calls."""

    def __init__(self, model: nn.Module, guards: Guards) -> None:
        self._model = model
        self._guards = guards
        self._known: dict[Hashable, bool] = {}
        self._snapshot: Any = None

    def follow_weights(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device, is_split: bool = False
    ) -> bool:
        """Whether a call of a method returns tensors that have a gradient for weights, which compute on `device`.

        Of a model that `is_split` it is enough that the method uses weights before it asks for numbers.
        """
        find = partial(follows_weights, self._model, getattr(self._model, name), args, kwargs, device, is_split)
        snapshot = self._guards.snapshot()
        if snapshot != self._snapshot or len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._snapshot = snapshot
        try:
            kind = name, is_split, outline((tuple(args), dict(kwargs)), [])
        except UnfamiliarError:
            return find()
        if kind not in self._known:
            self._known[kind] = find()
        return self._known[kind]


class _Uses(TorchFunctionMode):
    """Notes whether an operation has been given a weight."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or any(isinstance(each, nn.Parameter) for each in args)
        return func(*args, **(kwargs or {}))


def follows_weights(
    model: nn.Module,
    method: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    is_split: bool = False,
) -> bool:
    """Whether a method returns tensors that have a gradient for weights; it runs on fake tensors and leaves nothing."""
    tensors, tree = flatten((tuple(args), dict(kwargs)))
    if not any(each.dim() for each in tensors):
        return False

    uses, calls = _Uses(), list[Any]()

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if not torch.is_grad_enabled():  # a loop of calls without gradients, as ``generate``: one by one they count
            raise TraceError(f"{type(model).__name__} calls itself without gradients.")
        return model(*args, **kwargs)

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
            own_calls(model, call),
            uses,
        ):
            fakes = [fake_like(each.detach(), mode, device) for each in tensors]
            own_args, own_kwargs = tree.unflatten(fakes)
            found, _ = flatten(method(*own_args, **own_kwargs))
            return any(isinstance(each, Tensor) and each.requires_grad for each in found)
    except Exception:  # it asks for numbers: a trace of it, which knows those of constants, may still be possible
        return is_split and uses.found and not calls


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
