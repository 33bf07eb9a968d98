"""Finds the weights that an autograd function uses without being given them: those of modules that it can reach.

Such a function runs modules again in its backward, as reversible layers do. The modules need this rank's weights then,
too, which they have in the forward of the module that is kept whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from autovaruna._torch import pytree
from autovaruna.graph.kept_whole.applied import Call, Function, applied_by


def holder_of_weights(function: Function, arguments: Any) -> str:
    """Returns the name of a module, or kind of tensor, with gradients that a function can reach; empty: there is none.

    Tensors among its arguments do not count.
    """
    waiting = [*pytree.tree_leaves(arguments), function.forward, function.backward]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, Tensor):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module) and any(each.requires_grad for each in value.parameters()):
            return type(value).__qualname__
        for each in _within(value):
            if isinstance(each, Tensor) and each.requires_grad:
                return type(each).__qualname__
            waiting.append(each)
    return ""


@contextmanager
def with_weights_in_backward(put: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Has functions that reach weights, called on this thread while the context lasts, go backward in another one.

    Args:
        put: Makes that context, which puts weights into modules.
    """

    def applied(call: Call) -> Any:
        if call.context is not None and call.wants_gradient and holder_of_weights(call.function, call.arguments):
            call.context._forward_cls = _going_backward_in(put, call.function)
        return call.run()

    with applied_by(applied):
        yield


def _going_backward_in(put: Callable[[], AbstractContextManager[None]], function: Function) -> Function:
    own = function.backward

    @wraps(own)
    def backward(ctx: Any, *gradients: Any) -> Any:
        with put():
            return own(ctx, *gradients)

    return type(function.__name__, (function,), {"backward": staticmethod(backward)})


def _within(value: Any) -> Iterator[Any]:
    """Yields what a function holds besides its code."""
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from pytree.tree_leaves((value.func, value.args, value.keywords))
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        yield from pytree.tree_leaves((cells, value.__defaults__ or (), value.__kwdefaults__ or {}))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
