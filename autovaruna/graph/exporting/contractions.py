"""Lets ``torch.einsum`` ask another library for the order of its products: that one wants numbers for sizes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_COUNTED = 64
"""Stands for a length that the numbers in tensors decide."""


def ordered_by_numbers(get_library: Callable[[], Any]) -> Callable[[], Any]:
    """Returns what gives torch the library ``opt_einsum``, whose orders are then those for the sizes of the trace.

    What the products add up to is the same in any order, but for rounding.
    """

    def contract_path(equation: str, *operands: Tensor, **options: Any) -> Any:
        shapes = [tuple(map(_number, each.shape)) for each in operands]
        return get_library().contract_path(equation, *shapes, shapes=True, **options)

    return lambda: SimpleNamespace(contract_path=contract_path)


def _number(length: int | torch.SymInt) -> int:
    if not isinstance(length, torch.SymInt):
        return length
    return int(length.node.hint) if length.node.has_hint() else _COUNTED
