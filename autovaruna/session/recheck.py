"""Checks, on fake tensors in some later steps, that a forward still is what was traced: guards may miss something."""

from __future__ import annotations

import logging
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
from autovaruna.ranks.world import World
from autovaruna.runtime.witness import Witness
from autovaruna.session.traces import Traces

logger = logging.getLogger(__name__)
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


class TraceRecheck:
    """Rechecks traces on one rank: ranks do so in turns, and an error of one reaches all as they agree on the call.

    `kinds` is what the traced forward of each graph calls of torch.
    """

    def __init__(self, model: nn.Module, traces: Traces, world: World, witness: Witness) -> None:
        self._model, self._traces, self._world, self._witness = model, traces, world, witness
        self.kinds: dict[str, list[Any]] = {}

    def record(self, traced: TracedModel) -> None:
        """Records what a forward calls of torch that has just been traced."""
        if traced.needs_gradient and (calls := self._calls_now(traced)):
            self.kinds[traced.key] = calls

    def recheck(self, traced: TracedModel) -> bool:
        """Checks, if that is due and this rank's turn, that the forward is what was traced; says whether it did.

        Raises:
            TraceError: it is not.
        """
        clock, known = self._witness.clock, self.kinds.get(traced.key)
        if known is None or not clock.is_due(traced.key) or clock.num_looks % self._world.num_ranks != self._world.rank:
            return False
        began = thread_time()
        if (calls := self._calls_now(traced)) != known:
            self._compare_anew(traced)
            self.kinds[traced.key] = calls
        self._witness.seconds += thread_time() - began
        return True

    def _calls_now(self, traced: TracedModel) -> list[Any]:
        """Returns what the forward calls of torch now; empty: it needs numbers, and cannot be checked."""
        try:
            return _torch_calls(self._model, traced.call, self._traces.device)
        except Exception as error:
            logger.debug("the forward is not looked at again: %s", error)
            return []

    def _compare_anew(self, traced: TracedModel) -> None:
        found = self._traces.retrace(traced)
        if not is_same_graph(found, traced):
            raise TraceError(
                f"forward of {type(self._model).__name__} does something else than when it was traced: "
                f"{difference(traced, found)}. It reads something that the script, or forward itself, has changed and "
                "that is not followed, so steps since then may have used its old value. Make it an argument of "
                "forward, a buffer, or an attribute of a module; recheck_trace=False does not look at it."
                f"{self._witness.since(traced.key)}"
            )
