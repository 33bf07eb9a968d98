"""Says where a rank computes: its number on its host, and its device."""

from __future__ import annotations

import os

import torch

from autovaruna.errors import InputError
from autovaruna.runtime.worlds.environment import local_rank_in
from autovaruna.runtime.worlds.world import World


def local_rank_of(world: World) -> int:
    """Returns this rank's number on its host, as the launcher says, else by counting."""
    said = local_rank_in(os.environ)
    return said if said is not None else world.hosts[: world.rank].count(world.hosts[world.rank])


def device_of(device: int | str | torch.device | None, local_rank: int) -> torch.device:
    """Returns a device; a number means a GPU, or the CPU where there is none; None, as -1, that of `local_rank`.

    Raises:
        InputError: there is no such device.
    """
    device = -1 if device is None else device
    if isinstance(device, int):
        if not torch.cuda.is_available():
            return torch.device("cpu")
        number = local_rank % torch.cuda.device_count() if device < 0 else device
        if number >= torch.cuda.device_count():
            raise InputError(f"device is {device}: expected the number of one of {torch.cuda.device_count()} GPUs.")
        return torch.device("cuda", number)
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device is {device!r}, which cannot be used here: {error}.") from error
    return found
