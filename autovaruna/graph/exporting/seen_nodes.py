"""Shows forward the nodes of autograd as they are, but for their hooks, which a trace would drop without a word."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor

from autovaruna._torch import TensorBase
from autovaruna.errors import TraceError
from autovaruna.graph.origin import users_line

_HOOKS = ("register_hook", "register_prehook")
_MACHINERY = ("torch._", "torch.fx", "torch.utils", "torch.export")


@contextmanager
def seen_nodes() -> Iterator[None]:
    """Lets ``grad_fn`` of tensors, on this thread, give nodes that refuse hooks, and so do the nodes before them.

    Raises:
        TraceError: forward sets a hook on a node.
    """
    tracing = get_ident()
    plain: Any = TensorBase.grad_fn

    def get(self: Tensor) -> Any:
        node = plain.__get__(self)
        return node if get_ident() != tracing or _is_machinery() else _seen(node)

    Tensor.grad_fn = property(get)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.grad_fn  # torch.Tensor inherits it


def refuse_hook(what: str) -> TraceError:
    """Returns the error of a forward that sets a hook.

    Args:
        what: What it sets.
    """
    return TraceError(
        f"forward {what}{users_line()}, which a trace cannot keep. Expected a forward without hooks; write what the "
        "hook does to the gradient as operations, or set it in a submodule, which is then kept whole."
    )


class _Seen:
    """Stands for a node of autograd."""

    def __init__(self, node: Any) -> None:
        self._node = node

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._node)

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """Returns the nodes before it."""
        return tuple((_seen(node), place) for node, place in self._node.next_functions)

    def __getattr__(self, name: str) -> Any:
        return _refusing if name in _HOOKS else getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node is getattr(other, "_node", other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return repr(self._node)


def _refusing(*args: Any, **kwargs: Any) -> Any:
    raise refuse_hook("sets a hook on a node of autograd (grad_fn)")


def _seen(node: Any) -> Any:
    return None if node is None else _Seen(node)


def _is_machinery() -> bool:
    """Whether the innermost line of Python is of torch's own machinery."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith(_MACHINERY)
