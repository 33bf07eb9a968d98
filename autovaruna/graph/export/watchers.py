"""Lets forward hooks that only watch see the tensors of steps, and nothing of tracing, measuring or comparing.

While a model is traced, the hooks of a script are taken away, and each module that has some leaves marks on what goes
in and comes out. The nodes of the graph that were marked are what the hooks are given when a stage has run. A hook that
changes what the model computes is no watcher: the model is traced with it, as with any other line of its code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import local
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import FORWARD_HOOKS, replaced
from autovaruna.errors import InputError, OrderError
from autovaruna.graph.cuts import WATCHED, drop, is_mark, mark
from autovaruna.graph.guards import restored
from autovaruna.graph.outside import is_record
from autovaruna.graph.tree import HidingLeaf, Tree, Undelivered, flatten

_CONTAINERS = (list, dict, set, deque)
_DEPTH, _MOST = 4, 100_000
_tracing = local()


@dataclass(frozen=True)
class WatchedCall:
    """A call of a module with hooks, in a traced graph.

    Attributes:
        tree: structure of ``((args, kwargs), output)``.
        names: nodes whose values its tensors are, in order.
    """

    path: str
    tree: Tree
    names: tuple[str, ...]
    num_given: int


def is_of_script(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith("torch.")


def script_hooks(model: nn.Module) -> dict[str, list[Any]]:
    """Returns the forward hooks of a script, by the path of their modules."""
    found: dict[str, list[Any]] = {}
    for path, module in model.named_modules():
        hooks = [hook for table in FORWARD_HOOKS for hook in vars(module).get(table, {}).values() if is_of_script(hook)]
        if hooks:
            found[path] = hooks
    return found


@contextmanager
def without_script_hooks(model: nn.Module) -> Iterator[None]:
    tables = [vars(module)[table] for module in model.modules() for table in FORWARD_HOOKS if vars(module).get(table)]
    with restored(tables):
        for table in tables:
            for key in [key for key, hook in table.items() if is_of_script(hook)]:
                del table[key]
        yield


@contextmanager
def marked(model: nn.Module) -> Iterator[None]:
    """Has modules with hooks of a script leave marks, on this thread, in the place of these hooks."""
    paths = list(script_hooks(model))
    with without_script_hooks(model), replaced(_tracing, "calls", []), ExitStack() as hooks:
        for path in paths:
            module, entered = model.get_submodule(path), list[Any]()
            hooks.enter_context(module.register_forward_pre_hook(partial(_enter, entered), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(_leave, path, entered), with_kwargs=True))
        yield


def restart() -> None:
    """Forgets the calls of an attempt to trace that was given up."""
    if getattr(_tracing, "calls", None):
        _tracing.calls.clear()


def _enter(entered: list[Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    given, keys = _marked((args, kwargs))
    entered.append((given, keys))
    return given


def _leave(path: str, entered: list[Any], module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    given, given_keys = entered.pop()
    made, keys = _marked(output)
    _, tree = flatten((given, made))
    _tracing.calls.append((path, tree, [*given_keys, *keys], len(given_keys)))
    return made


def _marked(value: Any) -> tuple[Any, list[int]]:
    """Returns a structure whose tensors are marked, and the keys of the marks; objects that hide tensors are left."""
    tensors, tree = flatten(value)
    if any(isinstance(leaf, HidingLeaf) for leaf in tree.walk()):
        return value, [-1] * len(tensors)
    first = getattr(_tracing, "num_marks", 0)
    _tracing.num_marks = first + len(tensors)
    keys = list(range(first, _tracing.num_marks))
    return tree.unflatten([mark(each, WATCHED, str(key)) for each, key in zip(tensors, keys, strict=True)]), keys


def pop_watched(module: fx.GraphModule) -> tuple[WatchedCall, ...]:
    """Takes the marks out of a graph; returns the calls that it was traced with."""
    sources: dict[int, str] = {}
    marks: list[Any] = [node for node in module.graph.nodes if is_mark(node, WATCHED)]
    for node in marks:
        source = node.args[0]
        sources[int(node.args[2])] = sources[int(source.args[2])] if source in marks else source.name
    drop(marks)
    calls = getattr(_tracing, "calls", None) or ()
    return tuple(
        WatchedCall(path, tree, tuple(sources.get(key, "") for key in keys), num_given)
        for path, tree, keys, num_given in calls
        if not sources.keys().isdisjoint(keys)  # else it is inside of a module that is kept whole, with its hooks
    )


def kept_by_hooks(model: nn.Module) -> tuple[list[Any], dict[int, Any]]:
    """Returns the forward hooks of a script, and the containers that they may write into, by identity."""
    places: dict[int, Any] = {}
    hooks = [hook for hooks in script_hooks(model).values() for hook in hooks]
    for value in chain.from_iterable(map(_held_by, hooks)):
        _collect(value, places)
    return hooks, places


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Puts back what the hooks of a script keep in lists, dicts and attributes when the context ends."""
    hooks, places = kept_by_hooks(model)
    functions = [getattr(hook, "__func__", hook) for hook in hooks]
    cells = [(cell, cell.cell_contents) for each in functions for cell in getattr(each, "__closure__", None) or ()]
    try:
        with restored(places.values()):
            yield
    finally:
        for cell, known in cells:
            cell.cell_contents = known


def _collect(value: Any, places: dict[int, Any], depth: int = _DEPTH) -> None:
    """Adds the containers in a value, and the attributes of objects in it, by identity."""
    if isinstance(value, _CONTAINERS):
        inner = value
    elif is_record(value):
        inner = vars(value)
    else:
        return
    if id(inner) not in places and depth and len(inner) <= _MOST:
        places[id(inner)] = inner
        for each in list(inner.values() if isinstance(inner, dict) else inner):
            _collect(each, places, depth - 1)


def _held_by(hook: Any) -> Iterator[Any]:
    """Yields what a hook may write into."""
    if isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        hook = hook.func
    if isinstance(hook, MethodType):
        yield hook.__self__
        hook = hook.__func__
    if isinstance(hook, FunctionType):
        yield from (cell.cell_contents for cell in hook.__closure__ or ())
        yield from (hook.__globals__[name] for name in hook.__code__.co_names if name in hook.__globals__)
    else:
        yield hook


class _ShownTensor(torch.autograd.Function):
    """Shows a tensor to a hook; a backward that comes by it would miss the step."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise OrderError(
            "Backward reached a tensor that a forward hook has kept, left beside what the model returns. Expected a "
            "loss made of what the model returns; return that tensor, too."
        )


def call_hooks(model: nn.Module, call: WatchedCall, values: Mapping[str, Tensor]) -> None:
    """Calls the hooks of a module with what they see in one micro-batch, by the names of nodes on this rank.

    Raises:
        InputError: a hook returns something, which cannot be put into the model any more.
    """
    module = model.get_submodule(call.path)
    missing = Undelivered(HidingLeaf(f"{call.path} was given", "tensor"))
    tensors = [
        _ShownTensor.apply(values[name]) if name in values else missing  # type: ignore[no-untyped-call]
        for name in call.names
    ]
    (args, kwargs), output = call.tree.unflatten(tensors)
    for table, given in zip(FORWARD_HOOKS, ((), (output,)), strict=True):
        for key, hook in list(vars(module)[table].items()):
            if not is_of_script(hook):
                continue
            is_with_kwargs = key in vars(module)[f"{table}_with_kwargs"]
            if hook(module, args, *((kwargs,) if is_with_kwargs else ()), *given) is not None:
                raise InputError(
                    f"A forward hook of {call.path or 'the model'} returns something, but the model could not be "
                    "traced with it. Expected a hook that returns nothing, or one of operations of torch alone, which "
                    "is traced; write what it does into forward."
                )
