"""Gives ranks what a call has changed of the model's state, so that all go on from the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from autovaruna.runtime.weights.placement import OwnedState, Placement
from autovaruna.runtime.worlds.world import World


def share_state(changed: Collection[str], state: OwnedState, placement: Placement, world: World) -> None:
    """Overwrites what a call has changed with what the first rank that holds it has. Collective.

    Args:
        changed: Names of buffers, which go to every rank, and of parameters, which go to the ranks that hold them.
        state: The model's parameters and buffers.
        placement: Who holds which.
        world: The ranks.
    """
    every = tuple(range(world.num_ranks))
    groups: dict[tuple[int, tuple[int, ...], torch.dtype], list[Tensor]] = {}
    for name in sorted(changed):
        tensor, holders = state.tensor(name), placement.ranks_of(name)
        ranks = holders if isinstance(tensor, nn.Parameter) else every
        groups.setdefault((holders[0], ranks, tensor.dtype), []).append(tensor.detach())
    for (root, ranks, _), tensors in sorted(groups.items(), key=lambda group: str(group[0])):
        if len(ranks) > 1 and world.rank in ranks:
            _overwrite(tensors, root, ranks, world)


def _overwrite(tensors: Sequence[Tensor], root: int, ranks: tuple[int, ...], world: World) -> None:
    """Overwrites tensors of one dtype on `ranks` by those of rank `root`."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    world.broadcast(flat, root, ranks)
    if world.rank != root:
        for tensor, part in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
            tensor.data.copy_(part.view(tensor.shape))  # autograd may have kept it
