"""Clips gradients by the norm of all of them: the same number on every rank, for every plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.runtime.weights.placement import OwnedState, Placement
from autovaruna.runtime.worlds.differences import differences
from autovaruna.runtime.worlds.world import World

Norms = TypeVar("Norms")


def clip_grad_norm(
    state: OwnedState,
    placement: Placement,
    names: Sequence[str],
    world: World,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    what: str,
) -> Tensor:
    """Clips as ``torch.nn.utils.clip_grad_norm_`` does, over the parameters of all ranks. Collective.

    A parameter counts once, whoever holds it. The norms of single parameters are put together in the order of the
    model's own list, so that no plan changes the sum.

    Args:
        state: The model's parameters.
        placement: Who holds them.
        names: First names of all parameters, in the model's order.
        world: The ranks.
        max_norm, norm_type, error_if_nonfinite: As in PyTorch; the same on every rank.
        what: What to call it in errors.

    Returns:
        The norm before clipping.

    Raises:
        RankError: the ranks clip to other norms.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    here = {name: parameter for name, parameter in state.parameters().items() if not parameter.is_meta}
    own = {name: parameter.grad for name, parameter in here.items() if parameter.grad is not None}
    device = next((gradient.device for gradient in own.values()), torch.device("cpu"))
    options = {"max_norm": f"{float(max_norm):g}", "norm_type": f"{float(norm_type):g}"}
    parts = told_by_all(_norms(own, placement, names, world.rank, norm_type), options, world, what)
    known = {place: norm for of_rank in parts for place, norm in of_rank.items()}
    norms = torch.tensor([known.get(place, 0.0) for place in range(len(names))], dtype=torch.float64, device=device)
    dtype = torch.float32 if not own else next(iter(own.values())).dtype
    total = total_of(norms.to(dtype), norm_type, error_if_nonfinite)
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in own.values():
        gradient.mul_(coefficient)
    return total


def told_by_all(norms: Norms, options: Mapping[str, str], world: World, what: str) -> list[Norms]:
    """Returns the norms that each rank tells. Collective; a message would not say if a rank is elsewhere.

    Raises:
        RankError: the ranks ask with other options.
    """
    parts = world.gather_objects((norms, options), what)
    if found := differences([of_rank for _, of_rank in parts]):
        raise RankError(
            f"The ranks ask for different norms of gradients: {found}. Expected the same options on every rank."
        )
    return [of_rank for of_rank, _ in parts]


def total_of(norms: Tensor, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Returns the norm of norms.

    Raises:
        RuntimeError: it is not finite and `error_if_nonfinite` is set.
    """
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is {total.item()}, non-finite, so they cannot be clipped. "
            "Pass error_if_nonfinite=False to clip nevertheless."
        )
    return total


def _norms(
    own: Mapping[str, Tensor], placement: Placement, names: Sequence[str], rank: int, norm_type: float
) -> dict[int, float]:
    """Returns the norms of the gradients that this rank is the first to hold, by place in the list of names."""
    places = [place for place, name in enumerate(names) if name in own and placement.ranks_of(name)[0] == rank]
    norms = [torch.linalg.vector_norm(own[names[place]], norm_type).double() for place in places]
    return dict(zip(places, torch.stack(norms).tolist(), strict=True)) if norms else {}
