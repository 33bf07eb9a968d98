"""Replaces the clock of measurements by one that runs with the work that torch does, so that no machine matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autovaruna.graph.facts import flop_formulas
from autovaruna.profiler import measure as clocks

TICK_SECONDS = 1e-6
"""What an operation on numbers takes."""


class WorkClock(TorchDispatchMode):
    """Reads a microsecond more for each operation on two numbers, and for each number that is written.

    Views take no time; neither does Python.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._formulas: dict[Any, Callable[..., int]] = flop_formulas()

    def __call__(self) -> float:
        return self.seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.seconds += TICK_SECONDS * self._operations(func, args, kwargs or {}, result)
        return result

    def _operations(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        written = sum(leaf.numel() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
        formula = self._formulas.get(func.overloadpacket)
        return written + (formula(*args, **kwargs, out_val=result) / 2 if formula else 0)


@contextmanager
def work_clock(*modules: ModuleType) -> Iterator[WorkClock]:
    """Lets modules read a clock of work for the time of the context; nothing that they measured before counts."""
    with pytest.MonkeyPatch.context() as patch, WorkClock() as clock:
        for module in modules:
            patch.setattr(module, "perf_counter", clock, raising=False)
            patch.setattr(module, "own_clock", lambda device: clock)
        patch.setattr(clocks, "call_seconds", lru_cache(clocks.call_seconds.__wrapped__))
        yield clock


def plain_seconds(clock: WorkClock, forward: Callable[[], Tensor]) -> tuple[float, float]:
    """Returns the seconds of a forward and of its backward; from the second one on gradients add up, as in a step."""
    for _ in range(2):
        begin = clock()
        loss = forward()
        middle = clock()
        torch.autograd.backward(loss)
    return middle - begin, clock() - middle
