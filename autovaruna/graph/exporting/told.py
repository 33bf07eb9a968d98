"""Hides from a model that torch.export traces it: libraries have other ways for that, which may not fit the model.

They ask torch, or whether a tensor is a fake one. One whose numbers follow from constants alone is not, as far as they
know: whatever they go by is known while the model is traced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from autovaruna._torch import FakeTensor, subclasses
from autovaruna.graph.exporting.known import is_known
from autovaruna.graph.origin import is_users

_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")


@contextmanager
def untold() -> Iterator[None]:
    """Lets ``torch.compiler.is_compiling()`` and ``is_exporting()`` say no while the context lasts."""
    compiler: Any = torch.compiler
    before = {name: getattr(compiler, name) for name in _FLAGS if hasattr(compiler, name)}
    try:
        for name in before:
            setattr(compiler, name, False)
        yield
    finally:
        for name, flag in before.items():
            setattr(compiler, name, flag)


@contextmanager
def unseen_fakes() -> Iterator[None]:
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

    subclasses.FakeTensor = _Seen
    try:
        yield
    finally:
        subclasses.FakeTensor = FakeTensor
