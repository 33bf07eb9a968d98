"""Lets torch.export trace a repeated operation from memory: the model's own code runs as always, and so does all that
records the operation in the graph; the operation itself runs on fake tensors once for all that are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import proxy_tensor

from autovaruna.graph.recalling.globals_read import unnoted
from autovaruna.graph.recalling.recall import Call, Memory

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_OF_TORCH = ("_extract_tensor_metadata", "get_proxy_slot", "proxy_call", "track_tensor_tree")


@contextmanager
def recalled_repeats() -> Iterator[Repeats | None]:
    """Lets a trace recall operations while the context lasts, if this version of torch has what that takes.

    A forward that goes backward itself raises then, and has to be traced without.

    Yields:
        What is recalled; None: nothing is.
    """
    if not all(hasattr(proxy_tensor, name) for name in _OF_TORCH):
        yield None
        return
    own: Any = proxy_tensor
    run, describe = torch._ops.OpOverload.__call__, own._extract_tensor_metadata
    repeats = Repeats(own.proxy_call, run, describe, own.track_tensor_tree)
    own.proxy_call, own._extract_tensor_metadata = repeats.call, repeats.describe
    own.track_tensor_tree = _unseen(repeats.torch_track)
    torch._ops.OpOverload.__call__ = repeats.operator()  # type: ignore[method-assign]
    try:
        yield repeats
    finally:
        own.proxy_call, own._extract_tensor_metadata = repeats.torch_call, repeats.torch_describe
        own.track_tensor_tree = repeats.torch_track
        torch._ops.OpOverload.__call__ = repeats.torch_run  # type: ignore[method-assign]


class Repeats:
    """The operations of one trace.

    Args:
        torch_call: torch's function that records an operation, and runs it.
        torch_run: torch's method that runs an operation.
        torch_describe: torch's function that describes a result.
        torch_track: torch's function that notes which node of the graph a tensor is.

    Attributes:
        num_recalled: how many operations were recalled.
    """

    def __init__(
        self,
        torch_call: Callable[..., Any],
        torch_run: Callable[..., Any],
        torch_describe: Callable[..., Any],
        torch_track: Callable[..., Any],
    ) -> None:
        self.torch_call, self.torch_run, self.torch_describe = torch_call, torch_run, torch_describe
        self.torch_track = torch_track
        self.num_recalled = 0
        self._memory = Memory()
        self._answer: tuple[Any, Any] | None = None
        self._thread = get_ident()
        self._descriptions: dict[int, Any] = {}

    def call(self, mode: Any, operation: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        """Records an operation as `torch_call` does, but lets it run only if its result is not known."""
        self._answer, self._descriptions = None, {}
        is_alone = pre_dispatch and _is_alone()
        call = self._take_apart(mode, operation, args, kwargs) if is_alone else None
        recalled = None if call is None else self._memory.recall(call)
        if recalled is not None:
            result, tensors, descriptions = recalled
            self.num_recalled += 1
            self._answer = operation, result
            self._descriptions = {id(each): text for each, text in zip(tensors, descriptions, strict=True)}
        with unnoted() if is_alone and operation.namespace == "aten" else nullcontext():
            returned = self.torch_call(mode, operation, pre_dispatch, args, kwargs)
        if call is not None and recalled is None:
            self._memory.note(call, returned, lambda tensors: tuple(map(self.torch_describe, tensors)))
        return returned

    def operator(self) -> Callable[..., Any]:
        """Returns what runs an operation in place of `torch_run`: it gives the answer that is at hand, once."""

        def run(operation: Any, /, *args: Any, **kwargs: Any) -> Any:
            answer = self._answer
            if answer is None or answer[0] is not operation or get_ident() != self._thread:
                return self.torch_run(operation, *args, **kwargs)
            self._answer = None
            return answer[1]

        return run

    def describe(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns what `torch_describe` does, or did of the same layout."""
        known = self._descriptions.get(id(tensor))
        return self.torch_describe(tensor, *args, **kwargs) if known is None else known

    def _take_apart(self, mode: Any, operation: Any, args: Any, kwargs: Any) -> Call | None:
        def is_constant(tensor: Tensor) -> bool:
            slot = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
            return slot is None or slot.constant is not None

        return self._memory.take_apart(operation, args, kwargs, torch._C._get_dispatch_mode(_FAKE), is_constant)


def _unseen(track: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `track` so that it looks at tensors unseen by what watches the model's own functions."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return track(*args, **kwargs)

    return run


def _is_alone() -> bool:
    """Whether nothing else watches or transforms operations."""
    return torch._C._len_torch_dispatch_stack() == 1 and torch._C._functorch.peek_interpreter_stack() is None
