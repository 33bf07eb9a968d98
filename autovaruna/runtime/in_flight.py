"""Keeps what a stage needs of a micro-batch between its forward and its backward, and buffers that forwards change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from autovaruna._torch import preserve_version_counter
from autovaruna.graph.pieces import Deferred
from autovaruna.graph.traced import TracedModel
from autovaruna.ranks.transport.layout import is_dense, to_host
from autovaruna.stage.module import StageModule

NOTHING: Mapping[str, Tensor] = {}


@dataclass(slots=True, eq=False)
class InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward.

    Attributes:
        tensors: what it has received, until the forward has ended.
        returned: what the forward returned, with its graph.
        gradients: those of what it has received.
        before: state that the forward found and changed.
        stash: what it has received, if it runs forward again.
        deferred: weight gradients that the backward leaves for later.
    """

    tensors: Mapping[str, Tensor]
    returned: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    before: Mapping[str, Tensor] = field(default_factory=dict)
    stash: Stash | None = None
    deferred: Deferred | None = None


class Stash:
    """Tensors of a micro-batch between its forward and its recompute; those on a GPU may go to the host meanwhile.

    Copies run on the current stream in pinned memory, and nobody waits for them: the memory that a tensor had on the
    GPU is given to later work of the same stream alone, which comes after the copy.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, is_offloaded: bool) -> None:
        self._devices = {name: tensor.device for name, tensor in tensors.items()}
        self._tensors = {
            name: to_host(tensor, non_blocking=True) if is_offloaded and is_dense(tensor) else tensor
            for name, tensor in tensors.items()
        }

    def pop(self) -> dict[str, Tensor]:
        """Returns the tensors, on the devices where they were, and keeps them no longer."""
        tensors, self._tensors = self._tensors, {}
        return {name: tensor.to(self._devices[name], non_blocking=True) for name, tensor in tensors.items()}


class ChangedState:
    """The buffers (and parameters) of this rank's stages that the forwards of one call change.

    Some change once a call in plain PyTorch, whatever the samples are: the vectors of spectral normalisation, say. Of
    these, if there are several micro-batches, each finds what the first one found.
    """

    def __init__(self, traced: TracedModel, num_micro_batches: int) -> None:
        self.changes_once = num_micro_batches > 1 and bool(traced.steady_state)
        self._traced = traced
        self._before_first: dict[int, dict[str, Tensor]] = {}

    def restore_once_a_call(self, stage: StageModule) -> None:
        """Gives a micro-batch what the first one found of the state that changes once a call."""
        steady = stage.changed_state(self._traced.steady_state)
        if stage.index in self._before_first:
            _overwrite(steady, self._before_first[stage.index])
        else:
            self._before_first[stage.index] = _copies(steady)

    def copy(self, stage: StageModule) -> dict[str, Tensor]:
        """Returns the state before a forward, for when it runs again."""
        return _copies(stage.changed_state(self._traced.changed_state))

    @contextmanager
    def restored(self, stage: StageModule, before: Mapping[str, Tensor]) -> Iterator[None]:
        """Restores the state before a forward while it runs again; afterwards the state is what it was."""
        changed = stage.changed_state(self._traced.changed_state)
        now = _copies(changed)
        _overwrite(changed, before)
        yield
        _overwrite(changed, now)


def _copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def _overwrite(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Overwrites what forwards change; no backward reads it, so autograd need not know."""
    for name, value in values.items():
        with preserve_version_counter(state[name]):
            state[name].copy_(value)
