"""Gives numbers to the parameters of a model on ``meta``: each rank initialises its own part."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from autovaruna.errors import PlanError
from autovaruna.graph.random import default_generator, untouched_generator

if TYPE_CHECKING:
    from autovaruna.runtime.weights.placement import OwnedState


def materialize(
    state: OwnedState, held: Iterable[str], device: torch.device, seed: int, given: Container[str] = ()
) -> list[str]:
    """Initialises parameters and buffers that are on ``meta``.

    Each module is initialised from a seed of its own path, so that its numbers do not depend on the partition.

    Args:
        state: The model's state.
        held: First names of those that get memory on this rank.
        device: Where its numbers go.
        seed: What they are drawn from.
        given: First names of what a checkpoint will fill; it gets memory alone, unless its module has other tensors.

    Returns:
        First names of what was initialised, or is to be filled.

    Raises:
        PlanError: a module with tensors on ``meta`` has no initialiser.
    """
    wanted = set(held)
    missing = {name for name in state.places if state.tensor(name).is_meta and name in wanted}
    for name in missing:
        if name in given:
            state.replace(name, _empty_like(state.tensor(name), device))
    drawn = {name for name in missing if name not in given}
    with untouched_generator(device):
        for path, module in state.model.named_modules():
            names = [*module._parameters.keys(), *module._buffers.keys()]
            own = [path + "." + name if path else name for name in names]
            if any(state.first_name.get(name) in drawn for name in own):
                _initialise(state, path, module, own, device, seed)
    return sorted(missing)


def _initialise(
    state: OwnedState, path: str, module: nn.Module, own: list[str], device: torch.device, seed: int
) -> None:
    names = [state.first_name[name] for name in own if name in state.first_name]
    for name in names:
        if state.tensor(name).is_meta:
            state.replace(name, _empty_like(state.tensor(name), device))
    digest = hashlib.blake2b(f"{seed},{path}".encode(), digest_size=7).digest()
    default_generator(device).manual_seed(int.from_bytes(digest, "little"))
    reset = getattr(module, "reset_parameters", None)
    initialise = getattr(state.model, "_init_weights", None)
    with torch.no_grad():
        if callable(initialise):
            initialise(module)
        elif callable(reset):
            reset()
        else:
            raise PlanError(
                f"{path or type(module).__qualname__} is on the meta device and has neither reset_parameters() nor, in "
                "its model, _init_weights(module): got no numbers for "
                f"{', '.join(names)}. Give the module a reset_parameters(), or load a checkpoint first."
            )


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.zeros_like(tensor, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
