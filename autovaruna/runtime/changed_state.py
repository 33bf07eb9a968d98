"""Keeps what forwards change of parameters and buffers from those that must not find it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from autovaruna._torch import preserve_version_counter
from autovaruna.graph.traced import TracedModel
from autovaruna.stage.module import StageModule


class ChangedState:
    """The state of this rank's stages that the forwards of one call change.

    Args:
        traced: Says what its forward changes.
        num_micro_batches: Of the call.

    Attributes:
        is_steady: Whether micro-batches must `start_alike`: some of the state changes whatever their samples are, which
            is once a call in plain PyTorch.
    """

    def __init__(self, traced: TracedModel, num_micro_batches: int) -> None:
        self.is_steady = num_micro_batches > 1 and bool(traced.steady_state)
        self._traced = traced
        self._found_first: dict[int, dict[str, Tensor]] = {}

    def start_alike(self, stage: StageModule) -> None:
        """Gives a micro-batch what the first one found of the state that changes once a call."""
        steady = stage.changed_state(self._traced.steady_state)
        if stage.index in self._found_first:
            _overwrite(steady, self._found_first[stage.index])
        else:
            self._found_first[stage.index] = _copies(steady)

    def copy(self, stage: StageModule) -> dict[str, Tensor]:
        """Returns what a forward finds now, for when it runs again."""
        return _copies(stage.changed_state(self._traced.changed_state))

    @contextmanager
    def as_before(self, stage: StageModule, before: Mapping[str, Tensor]) -> Iterator[None]:
        """Puts back what a forward has found, as long as it runs again."""
        changed = stage.changed_state(self._traced.changed_state)
        now = _copies(changed)
        _overwrite(changed, before)
        yield
        _overwrite(changed, now)


def _copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def _overwrite(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Puts values back into what forward changes; no backward reads that, so autograd need not know."""
    for name, value in values.items():
        with preserve_version_counter(state[name]):
            state[name].copy_(value)
