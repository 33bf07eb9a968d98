"""Computes the numbers of fake tensors that follow from constants and shapes alone, while torch.export traces."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from autovaruna._torch import DisableTorchFunction, FakeTensor, OpOverload, disable_current_modes, schema_of
from autovaruna.graph.evaluate import NodeError, call, evaluate
from autovaruna.graph.operators import EMPTY, aliases_of, reached

_SIZES, _LARGE_SIZES = (2, 7), (61, 509)
"""Batch sizes for which numbers are computed, the large ones where they fit; what holds for all of them is constant."""
_MOST_ELEMENTS = 2**24
_SIZED = torch.SymInt | torch.SymFloat | torch.SymBool
_DETACH_, _DETACH = torch.ops.aten.detach_.default, torch.ops.aten.detach.default
_LITERAL = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Operators that make a tensor of numbers written in the code."""


class _UnknownError(Exception):
    """Says that numbers follow from inputs or weights, were drawn, or were written into memory."""


def numbers_of(tensor: Tensor, act: Callable[[Tensor], Any]) -> Any:
    """Returns what ``act``, such as ``Tensor.item``, returns for a fake tensor; None: its numbers are not known."""
    is_one = math.prod(tensor.shape) == 1 if all(isinstance(each, int) for each in tensor.shape) else False
    found = _evaluated(tensor, act) if is_one or act is Tensor.tolist else []
    return found[0] if found and all(each == found[0] for each in found) else None


def is_known(tensor: Tensor) -> bool:
    """Whether the numbers in a fake tensor follow from constants and shapes alone."""
    return bool(_evaluated(tensor, Tensor.numel))


def follows_held(tensor: Tensor) -> bool:
    """Whether numbers that are known follow from tensors that the model holds, which a script may change in place."""
    node = _node_of(tensor)
    held = [each for each in _cone(node) if each.op == "get_attr"] if node is not None else []
    return any(user.target not in _LITERAL for each in held for user in each.users)


def _evaluated(tensor: Tensor, act: Callable[[Tensor], Any]) -> list[Any]:
    """Returns what ``act`` returns for a fake tensor with some batch sizes; empty: its numbers are not known."""
    node = _node_of(tensor)
    if node is None:
        return []
    try:
        cone = _cone(node)
        _refuse_writes(cone)
        held = {each: value for each in cone if (value := _held(each)) is not None}
        with torch.no_grad(), disable_current_modes(), DisableTorchFunction():  # with numbers, and untraced
            large = [size for size in _LARGE_SIZES if all(_elements(each, size) <= _MOST_ELEMENTS for each in cone)]
            return [act(_computed(cone, held, size)) for size in (*_SIZES, *large)]
    except _UnknownError:
        return []


def _node_of(tensor: Tensor) -> fx.Node | None:
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    found = getattr(getattr(slot, "proxy", None), "node", None)
    return found if isinstance(found, fx.Node) else None


def _cone(last: fx.Node) -> list[fx.Node]:
    """Returns the operations that a value comes from, and the sizes that they take, in the order of the graph."""

    def sources(node: fx.Node) -> list[fx.Node]:
        if isinstance(node.meta.get("val"), _SIZED):
            return []
        if not _is_computable(node):
            raise _UnknownError
        return node.all_input_nodes

    return sorted(reached([last], sources))


def _held(node: fx.Node) -> Tensor | None:
    """Returns the tensor, neither parameter nor buffer, that a node takes from where the model holds it."""
    mode: Any = get_proxy_mode()
    value = vars(mode.tracer.root).get(str(node.target)) if node.op == "get_attr" and mode is not None else None
    return value if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else None


def _is_computable(node: fx.Node) -> bool:
    if node.target is operator.getitem or _held(node) is not None:
        return True
    target = node.target
    if not isinstance(target, OpOverload) or _writes(target):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or target.overloadpacket.__name__ in EMPTY:
        return False
    return _elements(node, _SIZES[-1]) <= _MOST_ELEMENTS


def _elements(node: fx.Node, size: int) -> int:
    """Returns how many numbers a value has for a batch of some size."""
    value = node.meta.get("val")
    shape = value.shape if isinstance(value, Tensor) else ()
    return math.prod(each if isinstance(each, int) else _size(each, size) for each in shape)


def _writes(target: OpOverload) -> bool:
    return schema_of(target).is_mutable and target is not _DETACH_


def _refuse_writes(cone: list[fx.Node]) -> None:
    """Makes sure that nothing has been written into what a value comes from, or into views of it."""
    tensors = [node for node in cone if not isinstance(node.meta.get("val"), _SIZED)]
    for node in reached(tensors, lambda node: filter(_may_be_view, node.users)):
        if any(isinstance(user.target, OpOverload) and _writes(user.target) for user in node.users):
            raise _UnknownError


def _may_be_view(node: fx.Node) -> bool:
    return not isinstance(node.target, OpOverload) or bool(aliases_of(node))


def _computed(cone: list[fx.Node], held: Mapping[fx.Node, Tensor], size: int) -> Any:
    sizes = {each: _size(value, size) for each in cone if isinstance(value := each.meta.get("val"), _SIZED)}
    known = {**held, **sizes}

    def run(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _DETACH(*args) if node.target is _DETACH_ else call(node, args, kwargs)

    try:
        return evaluate([each for each in cone if each not in known], known.__getitem__, cone[-1:], run)[cone[-1]]
    except NodeError as failed:
        raise failed.error from None


def _size(value: Any, size: int) -> Any:
    if not value.node.has_hint():
        raise _UnknownError
    expression = value.node.expr
    number = expression.subs(dict.fromkeys(expression.free_symbols, size))
    kind: Any = {torch.SymBool: bool, torch.SymFloat: float, torch.SymInt: int}[type(value)]
    return kind(number)
