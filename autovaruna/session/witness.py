"""Looks again, in a few later steps, whether a forward is what was traced: what no guard sees must not go by silently.

A forward runs on fake tensors, which costs a few steps; where it asks something else of torch, it is traced anew.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from time import perf_counter

from torch import nn

from autovaruna.errors import TraceError
from autovaruna.graph.export.asked import asked_of_torch
from autovaruna.graph.traced import TracedModel, difference, is_same_graph
from autovaruna.runtime.world import World
from autovaruna.session.traces import Traces

logger = logging.getLogger(__name__)
_DUE = (2, 10, 20, 40, 80, 160, 320, 640)  # calls of one kind in training, the one that was traced being the first
_STEPS, _SHARE = 1000, 0.01  # all looks together take at most this share of so many steps and the first call


@dataclass
class _Kind:
    """Calls of one kind; `asked` is what the traced forward asked of torch."""

    asked: list[Hashable]
    num_calls: int = 1


class Witness:
    """What one rank sees of it: ranks look in turns, and an error of one is told to all as they agree on the call."""

    def __init__(self, model: nn.Module, traces: Traces, world: World, step_seconds: float) -> None:
        self._model = model
        self._traces = traces
        self._world = world
        self._kinds: dict[str, _Kind] = {}
        self._left = _SHARE * _STEPS * step_seconds  # seconds that looks may take yet
        self._price = 0.0

    def begin(self, traced: TracedModel, call_seconds: float) -> None:
        """Notes what a forward asks of torch that has just been traced, in a call that took so long."""
        self._left += _SHARE * call_seconds
        if traced.needs_gradient and (asked := self._ask(traced)):
            self._kinds[traced.key] = _Kind(asked)
        self._price /= 2  # the next one is warm

    def look(self, traced: TracedModel) -> bool:
        """Looks whether the forward is what was traced, if that is due; says whether it has looked.

        Raises:
            TraceError: it is not.
        """
        kind = self._kinds.get(traced.key)
        if kind is None:
            return False
        kind.num_calls += 1
        if kind.num_calls not in _DUE or self._price > self._left:
            return False
        if _DUE.index(kind.num_calls) % self._world.num_ranks != self._world.rank:
            return False
        if (asked := self._ask(traced)) != kind.asked:
            self._trace_again(traced)
            kind.asked = asked
        return True

    def _ask(self, traced: TracedModel) -> list[Hashable]:
        """Returns what the forward asks of torch now; empty: it needs numbers, and cannot be looked at."""
        before = perf_counter()
        try:
            return asked_of_torch(self._model, traced.call, self._traces.device)
        except Exception as error:
            logger.debug("the forward is not looked at again: %s", error)
            return []
        finally:
            self._price = perf_counter() - before
            self._left -= self._price

    def _trace_again(self, traced: TracedModel) -> None:
        found = self._traces.again(traced)
        if not is_same_graph(found, traced):
            raise TraceError(
                f"forward of {type(self._model).__name__} does something else than when it was traced: "
                f"{difference(traced, found)}. It reads something that the script, or forward itself, has changed and "
                "that is not followed, so steps since then may have used its old value. Make it an argument of "
                "forward, a buffer, or an attribute of a module; recheck_trace=False does not look at it."
            )
