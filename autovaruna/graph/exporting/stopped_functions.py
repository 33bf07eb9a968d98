"""Finds functions of torch written in C++ in which a trace has stopped, which no traceback names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HOLDERS = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch.Tensor": torch.Tensor,
}
_OF_NUMBERS = frozenset({"item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "nonzero", "masked_select"})
"""Functions that return numbers of tensors, or as many as those say."""
_STOPS = frozenset({"DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException"})


@contextmanager
def stopped_functions(is_wanted: bool) -> Iterator[list[str]]:
    """Collects the names of the functions in which a trace stops while the context lasts, the innermost first."""
    stopped: list[str] = []
    if not is_wanted:
        yield stopped
        return
    with _Noting(stopped):
        yield stopped


def is_of_function(error: BaseException) -> bool:
    """Whether a function of torch that a trace has stopped in may be one that can be run, but not traced."""
    return type(error).__name__ in _STOPS


class _Noting(TorchFunctionMode):
    def __init__(self, stopped: list[str]) -> None:
        super().__init__()
        self._stopped = stopped

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return function(*args, **(kwargs or {}))
        except Exception as error:
            if is_of_function(error) and (name := _name_of(function)):
                self._stopped.append(name)
            raise


def _name_of(function: Any) -> str:
    """Returns what a model calls a function by; empty: it is none that can be kept whole."""
    name = getattr(function, "__name__", "")
    if name.startswith("_") or name in _OF_NUMBERS:
        return ""
    holders = (path for path, holder in _HOLDERS.items() if getattr(holder, name, None) is function)
    return next((f"{path}.{name}" for path in holders), "")
