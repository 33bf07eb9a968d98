"""Keeps buffers right that forwards change: once a call, not again by a recompute, and alike on all ranks."""

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
    """The state of this rank's stages that the forwards of one call change.

    If it `is_steady`, micro-batches must `start_alike`: some of it changes whatever their samples are, which is once a
    call in plain PyTorch.
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
