"""Checks, on fake tensors in a few later steps, that a forward still is what was traced: guards may miss something."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import thread_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from autovaruna._torch import FakeTensor, FakeTensorMode, disable_current_modes
from autovaruna.errors import TraceError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.export.errors import quiet_failure
from autovaruna.graph.export.watchers import without_script_hooks
from autovaruna.graph.module_state import example_inputs, unchecked_distributions, with_fake_state
from autovaruna.graph.precision import compiling_nothing, in_precision
from autovaruna.graph.random import python_generators
from autovaruna.graph.side_effects import restored_attributes
from autovaruna.graph.trace import one_at_a_time
from autovaruna.graph.traced import TracedModel, difference, is_same_graph
from autovaruna.graph.tree import words
from autovaruna.runtime.world import World
from autovaruna.session.traces import Traces

logger = logging.getLogger(__name__)
_DUE = (2, 10, 20, 40, 80, 160, 320, 640)  # calls of one kind in training, the one that was traced being the first
_NUM_STEPS, TIME_SHARE = 1000, 0.01  # all checks take at most this share of so many steps and the first call
_MOST = 2**16  # numbers of a tensor of which each counts


class _TorchCalls(TorchFunctionMode):
    """Records each function of torch that is called, with its arguments: tensors by the order in which they are met."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self._met = {id(each): (place, each) for place, each in enumerate([*model.parameters(), *model.buffers()])}

    def _describe(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return self._met.setdefault(id(value), (len(self._met), value))[0], value.shape, value.dtype
        if isinstance(value, tuple | list):
            return [self._describe(each) for each in value]
        if isinstance(value, dict):
            return {name: self._describe(each) for name, each in value.items()}
        with disable_current_modes():
            return words(value) if not isinstance(value, Tensor) or value.numel() < _MOST else str(value.shape)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((getattr(func, "__name__", ""), self._describe(args), self._describe(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _torch_calls(model: nn.Module, call: CallSpec, device: torch.device) -> list[Any]:
    """Returns what a forward calls of torch, in order; raises whatever a forward does that needs numbers."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with (
        one_at_a_time,
        restored_attributes(model),
        without_script_hooks(model),
        quiet_failure(),
        unchecked_distributions(),
        compiling_nothing(),
        python_generators(0),
        in_precision(call.precision),
        with_fake_state(model, mode, device),
    ):
        args, kwargs = call.arguments(example_inputs(call, max(2, call.batch_size), mode, device))
        recorder = _TorchCalls(model)
        with mode, recorder:
            call.of(model)(*args, **kwargs)
    return recorder.calls


@dataclass
class _WatchedCalls:
    """Calls of one kind; `calls` is what the traced forward calls of torch."""

    calls: list[Any]
    num_calls: int = 1


class TraceRecheck:
    """Rechecks traces on one rank: ranks do so in turns, and an error of one reaches all as they agree on the call."""

    def __init__(self, model: nn.Module, traces: Traces, world: World, step_seconds: float) -> None:
        self._model, self._traces, self._world = model, traces, world
        self.kinds: dict[str, _WatchedCalls] = {}
        self._seconds_left = TIME_SHARE * _NUM_STEPS * step_seconds  # seconds that checks may take yet
        self._expected_seconds = 0.0

    def record(self, traced: TracedModel, call_seconds: float) -> None:
        """Records what a forward calls of torch that has just been traced, in a call that took so long."""
        self._seconds_left += TIME_SHARE * call_seconds
        if (
            traced.needs_gradient
            and self._expected_seconds <= self._seconds_left
            and (calls := self._calls_now(traced))
        ):
            self.kinds[traced.key] = _WatchedCalls(calls)
            self._expected_seconds /= 2  # the next one is warm

    def recheck(self, traced: TracedModel) -> bool:
        """Checks, if that is due, that the forward is what was traced; says whether it did.

        Raises:
            TraceError: it is not.
        """
        kind = self.kinds.get(traced.key)
        if kind is None:
            return False
        kind.num_calls += 1
        if kind.num_calls not in _DUE or self._expected_seconds > self._seconds_left:
            return False
        if _DUE.index(kind.num_calls) % self._world.num_ranks != self._world.rank:
            return False
        if (calls := self._calls_now(traced)) != kind.calls:
            self._compare_anew(traced)
            kind.calls = calls
        return True

    def _calls_now(self, traced: TracedModel) -> list[Any]:
        """Returns what the forward calls of torch now; empty: it needs numbers, and cannot be checked."""
        before = thread_time()
        try:
            return _torch_calls(self._model, traced.call, self._traces.device)
        except Exception as error:
            logger.debug("the forward is not looked at again: %s", error)
            return []
        finally:
            self._expected_seconds = thread_time() - before
            self._seconds_left -= self._expected_seconds

    def _compare_anew(self, traced: TracedModel) -> None:
        found = self._traces.retrace(traced)
        if not is_same_graph(found, traced):
            raise TraceError(
                f"forward of {type(self._model).__name__} does something else than when it was traced: "
                f"{difference(traced, found)}. It reads something that the script, or forward itself, has changed and "
                "that is not followed, so steps since then may have used its old value. Make it an argument of "
                "forward, a buffer, or an attribute of a module; recheck_trace=False does not look at it."
            )
