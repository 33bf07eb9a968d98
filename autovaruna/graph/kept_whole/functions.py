"""Keeps autograd functions whole: a trace has the operations of their forward, but would lose their own backward.

While a model is traced, a call of a kept function leaves the operator ``autovaruna::function``; `take_functions` makes
each a call of `run_function`, which runs the user's function as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna._torch import TorchDispatchMode, pytree
from autovaruna.errors import TraceError
from autovaruna.graph.kept_whole.applied import Function, plain_apply


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor among arguments or results."""

    index: int


@dataclass
class _Call:
    """A kept function with everything but its tensors; `results` is what it returned, with places for tensors."""

    function: Function
    arguments: tuple[Any, ...]
    results: Any = None

    def run(self, tensors: Sequence[Tensor]) -> Any:
        filled = pytree.tree_map_only(_Place, lambda place: tensors[place.index], self.arguments)
        return plain_apply(self.function, *filled)


_calls: dict[str, _Call] = {}


def run_function(key: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Runs a kept function; returns the tensors among its results."""
    return [leaf for leaf in pytree.tree_leaves(_calls[key].run(tensors)) if isinstance(leaf, Tensor)]


def function_name(key: str) -> str:
    """Returns the name of a kept function."""
    return _calls[key].function.__qualname__


@torch.library.custom_op("autovaruna::function", mutates_args=())
def _kept(tensors: Sequence[Tensor], key: str) -> list[Tensor]:
    """Stands for a call in a trace; `_fake` says what comes out."""
    return [tensor.clone() for tensor in run_function(key, tensors)]


@_kept.register_fake
def _fake(tensors: Sequence[Tensor], key: str) -> list[Tensor]:
    call = _calls[key]
    versions = [tensor._version for tensor in tensors]
    with _NoRandomness(call.function):
        results = call.run(tensors)
    if [tensor._version for tensor in tensors] != versions:
        raise TraceError(_refusal(call.function, "it changes its arguments in place"))
    found, call.results = _without_tensors(results)
    return [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device) for each in found]


def keep(function: Function, args: tuple[Any, ...]) -> Any:
    """Calls a function so that a trace keeps it whole; returns what it returns.

    Raises:
        TraceError: it cannot be kept.
    """
    tensors, arguments = _without_tensors(args)
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in pytree.tree_leaves(arguments)):
        raise TraceError(_refusal(function, "it takes a size of the batch as a number"))
    key = _key_of(_Call(function, arguments))
    made = _kept(tensors, key)
    return pytree.tree_map_only(_Place, lambda place: made[place.index], _calls[key].results)


def take_functions(module: fx.GraphModule) -> None:
    """Has a graph call `run_function` where a function was kept."""
    for node in module.graph.nodes:
        if node.target is torch.ops.autovaruna.function.default:
            tensors, key = node.args
            node.target, node.args = run_function, (key, tensors)


def _key_of(call: _Call) -> str:
    """Notes a call, and returns its key: the same for the same function and arguments, and on every rank."""
    name = f"{call.function.__module__}.{call.function.__qualname__}{call.arguments!r}"
    for number in range(len(_calls) + 1):
        key = f"{name} {number}" if number else name
        known = _calls.setdefault(key, call)
        if known.function is call.function and _is_same(known.arguments, call.arguments):
            return key
    raise AssertionError("one key is always free")


def _is_same(known: Any, given: Any) -> bool:
    """Whether arguments are equal; those that only say where they lie in memory are, if they are one object."""
    try:
        return bool(known == given)
    except Exception:
        return False


def _without_tensors(values: Any) -> tuple[list[Tensor], Any]:
    """Returns the tensors of a structure, and the structure with places in their stead."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> _Place:
        tensors.append(tensor)
        return _Place(len(tensors) - 1)

    return tensors, pytree.tree_map_only(Tensor, take, values)


class _NoRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses random operations, which are to depend on step and micro-batch alone."""

    def __init__(self, function: Function) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.function = function

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise TraceError(_refusal(self.function, f"its forward draws random numbers ({func})"))
        return func(*args, **(kwargs or {}))


def _refusal(function: Function, reason: str) -> str:
    return (
        f"The torch.autograd.Function {function.__qualname__} cannot be traced: its backward is not the derivative of "
        f"its forward, and it cannot be kept whole, since {reason}. Expected a function of tensors that returns new "
        "ones; draw random numbers outside and pass them in, or write it with ordinary operations (a straight-through "
        "estimator is x + (f(x) - x).detach())."
    )
