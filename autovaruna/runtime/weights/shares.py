"""Knows the parameters whose optimizer state is shared out: each has one owner, which steps over it for all holders.

Gradient and state are the owner's alone. The others show a `RemoteGradient`, and get the numbers once all have stepped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from autovaruna._torch import by_tensor
from autovaruna.runtime.sums import Sums
from autovaruna.runtime.weights.placement import OwnedState, Placement
from autovaruna.runtime.weights.remote_parameter import Home, RemoteGradient, RemoteTensor
from autovaruna.runtime.world import World


@dataclass(eq=False)
class Share:
    """A parameter that this rank holds and of which one rank has gradient and state.

    Attributes:
        home: The owner.
        ranks: All that hold the parameter.
        world: The ranks.
        gradient: What this rank shows of the gradient, if it is another's; the same in every step.
    """

    home: Home
    ranks: tuple[int, ...]
    world: World
    gradient: RemoteGradient | None = field(default=None, init=False)

    @property
    def owner(self) -> int:
        """The rank that steps over the parameter."""
        return self.home.ranks[0]


_shares: Any = by_tensor()


def share_of(parameter: Tensor) -> Share | None:
    """Returns the share that a parameter is; None: every rank that holds it has gradient and state."""
    found: Share | None = _shares.get(parameter)
    return found


def steps_here(parameter: Tensor) -> bool:
    """Says whether an optimizer of this rank steps over a parameter."""
    if isinstance(parameter, RemoteTensor):
        return False
    share = share_of(parameter)
    return share is None or share.owner == share.world.rank


def note_shares(state: OwnedState, placement: Placement, world: World, device: torch.device) -> None:
    """Takes in the parameters of a model, which has been split, whose state is shared out."""
    for name, parameter in state.parameters().items():
        ranks = placement.ranks_of(name)
        if name in placement.owners and world.rank in ranks:
            home = Home(f"the gradient of {name}", (placement.owners[name],), world.rank, device, parameter.shape)
            _shares[parameter] = Share(home, ranks, world)


def note_gradients_of_others(parameters: Iterable[nn.Parameter]) -> None:
    """Shows the gradients that other ranks have, of those parameters that are shared out and trained."""
    for parameter in parameters:
        share = share_of(parameter)
        if share is not None and parameter.requires_grad and parameter.grad is None:
            if share.gradient is None:
                share.gradient = RemoteGradient.of(parameter, share.home)
            parameter.grad = share.gradient


def spread_steps(parameters: Iterable[Tensor]) -> None:
    """Gives the numbers of parameters that are shared out from their owners to all that hold them.

    Collective for these; each lists the same parameters, in one order.
    """
    sums: Sums | None = None
    for parameter in parameters:
        share = share_of(parameter)
        if share is not None:
            sums = sums or Sums(share.world, gathers=True)
            own = parameter.detach()
            sums.add(own, share.ranks, is_contiguous=own.is_contiguous(), owner=share.owner)
            if share.owner != share.world.rank:
                increment_version(parameter)
    if sums is not None:
        with torch.no_grad():
            sums.finish()
