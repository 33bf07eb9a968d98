"""Hides from a model that torch.export traces it: libraries have other ways for that, which may not fit the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
