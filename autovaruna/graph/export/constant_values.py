"""Knows the numbers in tensors of a trace that follow from constants and shapes alone.

It hides from libraries that these are fake, and that a model is traced: they have other ways for that, which may not
be those of plain PyTorch.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from autovaruna._torch import DisableTorchFunction, FakeTensor, OpOverload, disable_current_modes, replaced, subclasses
from autovaruna.graph.export.user_lines import is_users

_SIZES = (2, 7)
"""Batch sizes for which numbers are computed; what holds for both is taken to hold for all."""
_MOST_ELEMENTS = 2**24
EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
"""Operators that leave memory to chance."""
_SIZED = torch.SymInt | torch.SymFloat | torch.SymBool


class _UnknownError(Exception):
    """Says that numbers follow from inputs or weights, were drawn, or were written into memory."""


@contextmanager
def for_real() -> Iterator[None]:
    """Computes with numbers, and traces nothing, while the context lasts."""
    with torch.no_grad(), disable_current_modes(), DisableTorchFunction():
        yield


def truth_of(tensor: Tensor) -> bool | None:
    """Returns the truth of a fake tensor while a model is traced; None: it follows from more than constants."""
    truths = set(_truths(tensor))
    return truths.pop() if len(truths) == 1 else None


def is_known(tensor: Tensor) -> bool:
    """Whether the numbers in a fake tensor follow from constants and shapes alone."""
    return bool(_truths(tensor))


def _truths(tensor: Tensor) -> list[bool | None]:
    """Returns the truth of a tensor for some batch sizes, None if it has none; empty: its numbers are not known."""
    node = _node_of(tensor)
    if node is None:
        return []
    try:
        cone = _cone(node)
        _refuse_writes(cone)
        with for_real():
            numbers = [_computed(cone, size) for size in _SIZES]
            return [bool(each) if each.numel() == 1 else None for each in numbers]
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


def _is_computable(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or target.overloadpacket.__name__ in EMPTY:
        return False
    shape = value.shape if isinstance(value, Tensor) else ()
    return math.prod(each if isinstance(each, int) else _size(each, _SIZES[-1]) for each in shape) <= _MOST_ELEMENTS


def _refuse_writes(cone: list[fx.Node]) -> None:
    """Makes sure that nothing has been written into what a value comes from, or into views of it."""
    seen = {node for node in cone if not isinstance(node.meta.get("val"), _SIZED)}
    waiting = list(seen)
    while waiting:
        for user in waiting.pop().users:
            if isinstance(user.target, OpOverload) and user.target._schema.is_mutable:
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


def _computed(cone: list[fx.Node], size: int) -> Any:
    """Computes the last of some nodes for a batch size."""
    known: dict[fx.Node, Any] = {}
    for each in cone:
        value, target = each.meta.get("val"), each.target
        if isinstance(value, _SIZED):
            known[each] = _size(value, size)
        else:
            args, kwargs = fx.map_arg((each.args, each.kwargs), known.__getitem__)
            assert callable(target)
            known[each] = target(*args, **kwargs)
    return known[cone[-1]]


def _size(value: Any, size: int) -> Any:
    """Returns a size for a batch size."""
    if not value.node.has_hint():
        raise _UnknownError
    expression = value.node.expr
    number = expression.subs(dict.fromkeys(expression.free_symbols, size))
    kind: Any = {torch.SymBool: bool, torch.SymFloat: float, torch.SymInt: int}[type(value)]
    return kind(number)


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
