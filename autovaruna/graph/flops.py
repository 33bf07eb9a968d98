"""Counts the arithmetic of operations: torch's own formulas, and those for operations that torch has none for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten
Shape = Sequence[int]


class _NoModules(nullcontext[None]):
    """Stands for torch's tracker of modules, whose hooks fail in an autograd function that calls modules."""

    parents = frozenset({"Global"})


def counter() -> FlopCounterMode:
    """Returns a counter for everything that runs in its context, whichever module it is in."""
    made = FlopCounterMode(display=False, custom_mapping=_FORMULAS | _of_transformers())
    made.mod_tracker = _NoModules()  # type: ignore[assignment]
    return made


def formulas() -> dict[Any, Callable[..., int]]:
    """Returns, for each operation with a formula, a function of its arguments and of ``out_val``, its result."""
    registry: dict[Any, Callable[..., int]] = counter().flop_registry
    return registry


def _attention(query: Shape, key: Shape, value: Shape, *rest: Any, **more: Any) -> int:
    """Products with keys and values, which may have fewer heads; (batch, heads, tokens, features)."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *rest: Any, **more: Any) -> int:
    """Scores are computed again; gradients of scores and values, then of queries and keys."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _recurrent(x: Shape, of_input: Shape, of_hidden: Shape, *rest: Any, **more: Any) -> int:
    """One layer in one direction: two products for each step of each sample; (steps, samples, features)."""
    return 2 * x[0] * x[1] * (math.prod(of_input) + math.prod(of_hidden))


def _recurrent_gpu(x: Shape, weights: Sequence[Shape], *rest: Any, **more: Any) -> int:
    return 2 * x[0] * x[1] * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _product(matrix: Shape, *rest: Any, **more: Any) -> int:
    return 2 * math.prod(matrix)


def _grouped(one: Shape, other: Shape, *rest: Any, **more: Any) -> int:
    """Products of groups of rows, each with a matrix of its own: every row takes part in one product."""
    return 2 * math.prod(one) * other[-1]


def _of_transformers() -> dict[Any, Callable[..., int]]:
    """Returns the formulas of operators that the library transformers adds once it is imported."""
    own = torch.ops.transformers
    names = {"grouped_mm_fallback": _grouped, "grouped_mm_fallback_backward": lambda *args, **more: 2 * _grouped(*args)}
    return {getattr(own, name): formula for name, formula in names.items() if hasattr(own, name)}


_ATTENTIONS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_FORMULAS: dict[Any, Callable[..., int]] = {
    **{getattr(aten, f"_scaled_dot_product_{name}"): _attention for name in _ATTENTIONS},
    **{getattr(aten, f"_scaled_dot_product_{name}_backward"): _attention_backward for name in _ATTENTIONS},
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: lambda *args, **more: 2 * _recurrent(*args),
    aten._cudnn_rnn: _recurrent_gpu,
    aten._cudnn_rnn_backward: lambda *args, **more: 2 * _recurrent_gpu(*args),
    aten.mv: _product,
    aten.dot: _product,
    aten.addmv: lambda vector, matrix, *rest, **more: 2 * math.prod(matrix),
    aten.addr: _product,
    aten._grouped_mm: _grouped,
}
