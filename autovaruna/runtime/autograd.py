"""Joins stages and steps to autograd: what a stage receives, and what a call returns to its caller.

What `model(...)` returns is the output of one autograd function of this rank's parameters and of inputs that need a
gradient. So ``loss.backward()`` accumulates into ``.grad``, fires hooks, and scales by the gradient that comes in. That
is of the global batch; a backward through a module that the script calls beside the wrapper is not: see `DirectCalls`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock, local
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.modules.module import register_module_forward_hook

from autovaruna._torch import FakeTensor, SingleLevelFunction, is_graph_kept, pytree
from autovaruna.errors import OrderError


def arrive(tensor: Tensor, gradients: dict[str, Tensor], name: str) -> Tensor:
    """Returns a tensor that shares the memory of `tensor`, and whose gradient is noted in ``gradients[name]``.

    A leaf that accumulates would copy a gradient into ``.grad`` when somebody else holds it, or when its strides are
    not the leaf's: a copy of every message, and other last bits in the stage before. No operation writes into what it
    received (`graph/grouping.py`), which autograd would refuse of a view of a leaf.
    """
    leaf = tensor.detach().requires_grad_()
    leaf._backward_hooks = {0: partial(gradients.__setitem__, name)}
    arrived = leaf[...]
    leaf.requires_grad_(False)  # from here on autograd only calls the hook
    return arrived


def go_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor], is_kept: bool = False) -> None:
    """Runs backward as ``torch.autograd.backward``, whose checks take as long as a small stage computes."""
    for root, gradient in zip(roots, gradients, strict=True):
        assert root.shape == gradient.shape, f"gradient of shape {gradient.shape} for a tensor of shape {root.shape}"
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), is_kept, False, (), allow_unreachable=True, accumulate_grad=True
    )


Gradients = Sequence[Tensor | None]
Finish = Callable[[Gradients, bool], Gradients]
"""Turns gradients of outputs into those of sources; told whether the caller may go backward again (`retain_graph`)."""


class _Published(SingleLevelFunction):
    """Without the layer of `torch.autograd.Function` for torch.func, which looks at every parameter."""

    @staticmethod
    def forward(ctx: Any, finish: Finish, outputs: Sequence[Tensor], carries: Sequence[bool], *roots: Tensor) -> Any:
        ctx.finish = finish
        ctx.materialize_grads = False
        fresh = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(output for output, carry in zip(fresh, carries, strict=True) if not carry))
        return fresh

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise OrderError(
                "A second derivative of a step: got create_graph=True, but a step computes numbers alone. Expected a "
                "backward without it; compute a penalty on gradients in the model's own forward."
            )
        finish, is_kept = ctx.finish, bool(is_graph_kept())
        if finish is None:
            raise OrderError(
                "Backward through the same step a second time: its gradients have been given out. Call the model "
                "again, or pass retain_graph=True to every backward but the last."
            )
        if not is_kept:
            ctx.finish = None
        with own_code():
            return None, None, None, None, *finish(gradients, is_kept)


def follows_a_call(tensor: Tensor) -> bool:
    """Whether a tensor was made from what a call of a model returned, so that a backward goes on into that call."""
    waiting, seen = [tensor.grad_fn], {tensor.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if getattr(node, "_forward_cls", None) is _Published:
            return True
        new = {source for source, _ in node.next_functions} - seen
        seen |= new
        waiting += new
    return False


def publish(
    outputs: Sequence[Tensor], carries: Sequence[bool], sources: Sequence[Tensor], finish: Finish
) -> list[Tensor]:
    """Returns `outputs` as results of an autograd function of `sources`, which get gradients.

    A backward may start from those that carry one; it calls `finish`, once more after each that keeps the graph.
    """
    root = torch.zeros((), requires_grad=True)  # a rank without parameters takes part in backward, too
    return list(_Published.apply(finish, tuple(outputs), tuple(carries), root, *sources))  # type: ignore[attr-defined]


def while_unchanged(finish: Finish, held: Mapping[str, Tensor], saved: Collection[str]) -> Finish:
    """Returns `finish`, for as long as nothing changes in place what this rank holds of the saved weights."""
    weights = {name: held[name] for name in saved if name in held}
    versions = {name: weight._version for name, weight in weights.items()}

    def checked(gradients: Gradients, is_kept: bool) -> Gradients:
        changed = [name for name, weight in weights.items() if weight._version != versions[name]]
        if changed:
            raise OrderError(
                f"A backward after weights have changed: got other numbers in {sorted(changed)[0]} than the call of "
                "the model had, whose gradients need those (an optimizer has stepped, say). Expected all backwards of "
                "a call before that; go backward first, or call the model again."
            )
        return finish(gradients, is_kept)

    return checked


_on_this_thread = local()
_owners: WeakKeyDictionary[nn.Module, tuple[ReferenceType[DirectCalls], str]] = WeakKeyDictionary()
_lock = Lock()
_is_watching = False


@contextmanager
def own_code() -> Iterator[None]:
    """Notes that what runs on this thread is the library's own."""
    before = getattr(_on_this_thread, "is_own", False)
    _on_this_thread.is_own = True
    try:
        yield
    finally:
        _on_this_thread.is_own = before


class DirectCalls:
    """The modules of a model, beside the wrapper, through which a backward has gone: the paths that are `used`."""

    def __init__(self, model: nn.Module) -> None:
        global _is_watching
        self.used: set[str] = set()
        for path, module in model.named_modules():
            _owners[module] = ref(self), path
        with _lock:
            if not _is_watching:
                register_module_forward_hook(_note)
                _is_watching = True

    def take(self) -> str:
        """Returns the outermost module that a backward has gone through since the last time; empty: through none."""
        used, self.used = self.used, set()
        return min((path or "the model itself" for path in used), key=len, default="")


def _note(module: nn.Module, args: Any, output: Any) -> None:
    """Waits for a backward through what a module has returned."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or getattr(_on_this_thread, "is_own", False):
        return
    known, path = _owners.get(module, (None, ""))
    owner = None if known is None else known()
    if owner is None or any(isinstance(each, nn.Parameter) for each in args):  # those make weights of weights
        return
    for each in pytree.tree_leaves(output):
        if isinstance(each, Tensor) and each.requires_grad and not isinstance(each, FakeTensor):
            each.register_hook(lambda gradient: owner.used.add(path))  # type: ignore[no-untyped-call]
