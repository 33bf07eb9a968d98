"""Traces ``x.data``, which torch.export does not see: reads as ``x.detach()``, assignments as copies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor

from autovaruna._torch import FakeTensor, FunctionalTensor, TensorBase
from autovaruna.errors import TraceError


@contextmanager
def traced_data() -> Iterator[None]:
    """Traces reads and assignments of ``data`` on this thread, while the context lasts."""
    tracing = get_ident()
    plain: Any = TensorBase.data

    def is_traced(tensor: Tensor) -> bool:
        return get_ident() == tracing and isinstance(tensor, FakeTensor | FunctionalTensor) and not _is_of_torch()

    def get(self: Tensor) -> Any:
        return self.detach() if is_traced(self) else plain.__get__(self)

    def assign(self: Tensor, value: Tensor) -> None:
        if is_traced(self):
            _copy(self, value)
        else:
            plain.__set__(self, value)

    Tensor.data = property(get, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.data  # torch.Tensor inherits it


def _is_of_torch() -> bool:
    """Whether the innermost line of Python is of torch's own machinery, which handles fake tensors itself."""
    name = str(sys._getframe(3).f_globals.get("__name__"))
    return name.startswith(("torch._", "torch.fx", "torch.utils"))


def _copy(target: Tensor, value: Tensor) -> None:
    if value.shape != target.shape or value.dtype != target.dtype:
        raise TraceError(
            f"forward assigns to the data of a tensor: got {tuple(value.shape)} {value.dtype}, expected "
            f"{tuple(target.shape)} {target.dtype}. Keep the shape and dtype, or make a new tensor."
        )
    target.detach().copy_(value.detach())
