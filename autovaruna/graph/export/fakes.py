"""Runs models on fake tensors, whose numbers are known as far as they follow from constants, and leaves nothing behind.

A model's own tensors are swapped for some without numbers. Libraries do not see that those which follow from constants
and shapes alone are fake, or that a model is traced: they have other ways for that, which may not be those of plain
PyTorch. What a forward leaves in its modules besides outputs is put back.
"""

from __future__ import annotations

import logging
import math
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident, local
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autovaruna._torch import (
    OWN_CALL,
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    ModuleStackTracer,
    OpOverload,
    disable_current_modes,
    in_kernel_invocation,
    replaced,
    subclasses,
)
from autovaruna.errors import TraceError
from autovaruna.graph.call import CallSpec, UnfamiliarError, outline
from autovaruna.graph.export.errors import is_users, quiet_failure, warn_once
from autovaruna.graph.guards import OF_MODULES, Guards, entries, full_name, is_plain, records, restored
from autovaruna.graph.precision import compiling_nothing
from autovaruna.graph.random import own_cache
from autovaruna.graph.tree import flatten

logger = logging.getLogger(__name__)


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """Returns a fake tensor of the same shape, strides and dtype that says it is on `device`."""
    with in_kernel_invocation(mode):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, empty, device)


@contextmanager
def faked(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Makes every parameter and buffer of `model` fake while the context lasts; tied ones stay tied.

    Parameters that this rank does not hold (they are on ``meta``) are traced like the others.
    """
    memo: dict[int, Tensor] = {}
    tables = [table for module in model.modules() for table in (vars(module), module._parameters, module._buffers)]
    with restored(tables):
        for path, module in model.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                if is_lazy(tensor):
                    raise TraceError(
                        f"{f'{path}.{name}'.removeprefix('.')} has no shape yet: got a lazy parameter. Expected an "
                        "initialised one; run one batch through the model before wrapping it."
                    )
                put(module, name, memo.setdefault(id(tensor), _fake(tensor, mode, device)))
        yield


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
    with replaced(Distribution, "_validate_args", False):
        yield


_SIZES = (2, 7)
"""Batch sizes for which numbers are computed; what holds for both is taken to hold for all."""
_MOST_ELEMENTS = 2**24
EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
"""Operators that leave memory to chance."""
_SIZED = torch.SymInt | torch.SymFloat | torch.SymBool


_DETACH_, _DETACH = torch.ops.aten.detach_.default, torch.ops.aten.detach.default
_LITERAL = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""What takes the numbers that are written out in a forward."""


class _UnknownError(Exception):
    """Says that numbers follow from inputs or weights, were drawn, or were written into memory."""


def numbers_of(tensor: Tensor, act: Callable[[Tensor], Any]) -> Any:
    """Returns what ``act``, such as ``Tensor.item``, says of a fake tensor; None: more than constants decide that."""
    is_one = math.prod(tensor.shape) == 1 if all(isinstance(each, int) for each in tensor.shape) else False
    found = _known(tensor, act) if is_one or act is Tensor.tolist else []
    return found[0] if found and all(each == found[0] for each in found) else None


def is_known(tensor: Tensor) -> bool:
    """Whether the numbers in a fake tensor follow from constants and shapes alone."""
    return bool(_known(tensor, Tensor.numel))


def follows_held(tensor: Tensor) -> bool:
    """Whether numbers that are known follow from tensors that the model holds, which a script may change in place."""
    node = _node_of(tensor)
    held = [each for each in _cone(node) if each.op == "get_attr"] if node is not None else []
    return any(user.target not in _LITERAL for each in held for user in each.users)


def _known(tensor: Tensor, act: Callable[[Tensor], Any]) -> list[Any]:
    """Returns what ``act`` says of a fake tensor for some batch sizes; empty: its numbers are not known."""
    node = _node_of(tensor)
    if node is None:
        return []
    try:
        cone = _cone(node)
        _refuse_writes(cone)
        held = {each: value for each in cone if (value := _held(each)) is not None}
        with torch.no_grad(), disable_current_modes(), DisableTorchFunction():  # with numbers, and untraced
            return [act(_computed(cone, dict(held), size)) for size in _SIZES]
    except _UnknownError:
        return []


def _node_of(tensor: Tensor) -> fx.Node | None:
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    found = getattr(getattr(slot, "proxy", None), "node", None)
    return found if isinstance(found, fx.Node) else None


def _cone(last: fx.Node) -> list[fx.Node]:
    """Returns the operations that a value comes from, and the sizes that they take, in the order of the graph."""
    found, waiting = {last}, [last]
    while waiting:
        node = waiting.pop()
        if isinstance(node.meta.get("val"), _SIZED):
            continue
        if not _is_computable(node):
            raise _UnknownError
        waiting += [source for source in node.all_input_nodes if source not in found]
        found.update(node.all_input_nodes)
    return sorted(found)


def _held(node: fx.Node) -> Tensor | None:
    """Returns the tensor, neither parameter nor buffer, that a node takes from where the model holds it."""
    mode: Any = get_proxy_mode()
    value = vars(mode.tracer.root).get(str(node.target)) if node.op == "get_attr" and mode is not None else None
    return value if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else None


def _is_computable(node: fx.Node) -> bool:
    if node.target is operator.getitem or _held(node) is not None:
        return True
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or _writes(target):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or target.overloadpacket.__name__ in EMPTY:
        return False
    shape = value.shape if isinstance(value, Tensor) else ()
    return math.prod(each if isinstance(each, int) else _size(each, _SIZES[-1]) for each in shape) <= _MOST_ELEMENTS


def _writes(target: OpOverload) -> bool:
    return target._schema.is_mutable and target is not _DETACH_


def _refuse_writes(cone: list[fx.Node]) -> None:
    """Makes sure that nothing has been written into what a value comes from, or into views of it."""
    seen = {node for node in cone if not isinstance(node.meta.get("val"), _SIZED)}
    waiting = list(seen)
    while waiting:
        for user in waiting.pop().users:
            if isinstance(user.target, OpOverload) and _writes(user.target):
                raise _UnknownError
            may_be_view = not isinstance(user.target, OpOverload) or aliases_of(user)
            if user not in seen and may_be_view:
                seen.add(user)
                waiting.append(user)


def aliases_of(node: fx.Node) -> list[Any]:
    """Returns what torch's schema says of each result of an operation that is memory of an argument."""
    if not isinstance(node.target, OpOverload):
        return []
    return [each.alias_info for each in node.target._schema.returns if each.alias_info is not None]


def _computed(cone: list[fx.Node], known: dict[fx.Node, Any], size: int) -> Any:
    for each in cone:
        value, target = each.meta.get("val"), each.target
        if isinstance(value, _SIZED):
            known[each] = _size(value, size)
        elif each not in known:
            args, kwargs = fx.map_arg((each.args, each.kwargs), known.__getitem__)
            act: Any = _DETACH if target is _DETACH_ else target
            known[each] = act(*args, **kwargs)
    return known[cone[-1]]


def _size(value: Any, size: int) -> Any:
    if not value.node.has_hint():
        raise _UnknownError
    expression = value.node.expr
    number = expression.subs(dict.fromkeys(expression.free_symbols, size))
    kind: Any = {torch.SymBool: bool, torch.SymFloat: float, torch.SymInt: int}[type(value)]
    return kind(number)


@contextmanager
def modules_followed() -> Iterator[None]:
    """Has torch.export follow the modules of this thread alone while the context lasts, those that raise as well.

    It sees those of all threads, copies that are tried out as well, and goes wrong where forward catches an error.
    """
    tracing, call, get = get_ident(), ModuleStackTracer.call_module, ModuleStackTracer.getattr

    def call_module(self: Any, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if get_ident() != tracing:
            return forward(*args, **kwargs)
        running = self.module_stack.copy()
        try:
            return call(self, module, forward, args, kwargs)
        except BaseException:
            self.module_stack = running
            raise

    def get_own(self: Any, name: str, value: Any, known: Any) -> Any:
        return get(self, name, value, known) if get_ident() == tracing else value

    with replaced(ModuleStackTracer, "call_module", call_module), replaced(ModuleStackTracer, "getattr", get_own):
        yield


@contextmanager
def hide_tracing() -> Iterator[None]:
    """Lets ``torch.compiler.is_compiling()`` and ``is_exporting()`` say no while the context lasts."""
    compiler = torch.compiler
    with replaced(compiler, "_is_compiling_flag", False), replaced(compiler, "_is_exporting_flag", False):
        yield


@contextmanager
def hide_fakes() -> Iterator[None]:
    """Lets no library see on this thread, while the context lasts, that a tensor whose numbers are known is fake."""
    tracing = get_ident()

    class _Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            asks = get_ident() == tracing and is_users(sys._getframe(1).f_code.co_filename)
            return isinstance(value, FakeTensor) and not (asks and is_known(value))

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, FakeTensor)

    class _Seen(metaclass=_Kind):
        """Stands for the class of fake tensors where others than torch ask for it."""

    with replaced(subclasses, "FakeTensor", _Seen):
        yield


_CONTAINERS = (list, dict, OrderedDict, set)
_MOST_NAMES = 5


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Puts back the attributes of modules and of their objects when the context ends; new ones are taken away.

    A model that is run on fake tensors may keep some of them. What `parametrize.cached()` keeps is kept apart, too.
    """
    places = [vars(owner) for owner in (*model.modules(), *(each for _, each in records(model)))]
    held = [value for place in places for value in place.values() if type(value) in _CONTAINERS]
    with restored([*places, *held]), own_cache():
        yield


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


class _ProfilingThread(local):
    is_profiling = False


_thread = _ProfilingThread()


def is_profiling() -> bool:
    """Whether only time and memory count on this thread."""
    return _thread.is_profiling


@contextmanager
def profiling_mode() -> Iterator[None]:
    """Lets copies stand in for modules that are kept whole, so that what is measured leaves no trace in the model."""
    with replaced(_thread, "is_profiling", True):
        yield


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


class _Uses(TorchFunctionMode):
    """Notes whether an operation has been given a weight."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or any(isinstance(each, nn.Parameter) for each in args)
        return func(*args, **(kwargs or {}))


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
        snapshot = self._guards.snapshot()
        if snapshot != self._snapshot or len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._snapshot = snapshot
        try:
            kind = name, is_split, outline((tuple(args), dict(kwargs)), [])
        except UnfamiliarError:
            return self._try_out(name, args, kwargs, device, is_split)
        if kind not in self._known:
            self._known[kind] = self._try_out(name, args, kwargs, device, is_split)
        return self._known[kind]

    def _try_out(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device, is_split: bool
    ) -> bool:
        tensors, tree = flatten((tuple(args), dict(kwargs)))
        if not any(each.dim() for each in tensors):
            return False
        uses, calls = _Uses(), list[Any]()

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if not torch.is_grad_enabled():  # a loop of calls without gradients, as ``generate``: one by one they count
                raise TraceError(f"{type(self._model).__name__} calls itself without gradients.")
            return self._model(*args, **kwargs)

        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        try:
            with (
                unchecked_distributions(),
                quiet_failure(),
                as_before(self._model),
                compiling_nothing(),
                faked(self._model, mode, device),
                mode,
                torch.enable_grad(),
                own_calls(self._model, call),
                uses,
            ):
                fakes = [fake_like(each.detach(), mode, device) for each in tensors]
                own_args, own_kwargs = tree.unflatten(fakes)
                found, _ = flatten(getattr(self._model, name)(*own_args, **own_kwargs))
                return any(isinstance(each, Tensor) and each.requires_grad for each in found)
        except Exception:  # it asks for numbers: a trace of it, which knows those of constants, may still be possible
            return is_split and uses.found and not calls
