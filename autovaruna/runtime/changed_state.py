"""Restores buffers that a forward changed, where it runs again, and makes them alike on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autovaruna._torch import preserve_version_counter
from autovaruna.graph.traced import TracedModel
from autovaruna.runtime.weights import OwnedState, Placement
from autovaruna.runtime.world import World
from autovaruna.stage.module import StageModule


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


def share_state(changed: Collection[str], state: OwnedState, placement: Placement, world: World) -> None:
    """Overwrites changed buffers everywhere, and parameters where held, by those of the first holder. Collective."""
    every = tuple(range(world.num_ranks))
    groups: dict[tuple[int, tuple[int, ...], torch.dtype], list[Tensor]] = {}
    for name in sorted(changed):
        tensor, holders = state.tensor(name), placement.ranks_of(name)
        ranks = holders if isinstance(tensor, nn.Parameter) else every
        groups.setdefault((holders[0], ranks, tensor.dtype), []).append(tensor.detach())
    for (root, ranks, _), tensors in sorted(groups.items(), key=lambda group: str(group[0])):
        if len(ranks) > 1 and world.rank in ranks:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            world.broadcast(flat, root, ranks)
            parts = torch.split(flat, [each.numel() for each in tensors])
            for tensor, part in zip(tensors, parts, strict=True) if world.rank != root else ():
                tensor.data.copy_(part.view(tensor.shape))  # autograd may have kept it
