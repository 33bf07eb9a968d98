"""Finds out what the planner must know of the machine and of the optimizer."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.errors import PlanError
from autovaruna.graph.random import untouched_generator
from autovaruna.profiler.records import Cluster
from autovaruna.profiler.speed import measure_speed
from autovaruna.runtime.links import measure_links
from autovaruna.runtime.world import World
from autovaruna.settings import Settings


def find_device(model: nn.Module, settings: Settings) -> torch.device:
    """Returns where this rank computes: where the model is, or, for a model on ``meta``, a GPU if there is one."""
    if settings.device != "auto":
        return torch.device(settings.device)
    own = next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    if own.type != "meta":
        return own
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def rank_memory(world: World, device: torch.device, settings: Settings) -> float:
    """Returns the bytes that this rank may use: the setting, or its share of what the device has, less the margin."""
    total = float(settings.memory_limit_bytes) or _device_memory(world, device)
    return total * (1.0 - settings.memory_margin)


def _device_memory(world: World, device: torch.device) -> float:
    num_sharing = Counter(world.hosts)[world.hosts[world.rank]]
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return float(total) / -(-num_sharing // torch.cuda.device_count())
    return host_memory() / num_sharing


def host_memory() -> float:
    """Returns the bytes of memory that this host has."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def describe_cluster(world: World, device: torch.device, settings: Settings) -> Cluster:
    """Measures links and speeds. Collective."""
    local, remote, all_reduce = measure_links(world)
    mine = (rank_memory(world, device, settings), measure_speed(device))
    known = world.gather_objects(mine, "measuring speeds")
    seconds = [each for _, each in known]
    return Cluster(
        hosts=world.hosts,
        memory_bytes=tuple(memory for memory, _ in known),
        speeds=tuple(_relative_speed(each, seconds) for each in seconds),
        local_link=local,
        remote_link=remote,
        all_reduce_bytes_per_second=all_reduce,
    )


def _relative_speed(seconds: float, everyone: list[float]) -> float:
    """Returns a rank's speed relative to the typical one; what lies within the clock's noise counts as equal."""
    typical = sorted(everyone)[len(everyone) // 2]
    speed = typical / seconds
    return 1.0 if 0.8 < speed < 1.25 else speed


def optimizer_factor(optimizer: torch.optim.Optimizer | None, settings: Settings) -> float:
    """Returns the bytes of optimizer state for each byte of a trained parameter, by trying the optimizer out.

    Raises:
        PlanError: the optimizer cannot be tried out.
    """
    if settings.optimizer_bytes_factor != "auto":
        return float(settings.optimizer_bytes_factor)
    if optimizer is None:
        return 0.0
    trial = nn.Parameter(torch.zeros(64, 64))
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    try:
        with untouched_generator(torch.device("cpu")):
            copy = type(optimizer)([{"params": [trial], **options}], **_arguments(optimizer))
            trial.grad = torch.ones_like(trial)
            copy.step()
    except Exception as error:
        raise PlanError(
            f"Cannot find out how much state {type(optimizer).__name__} keeps: {error}. Pass optimizer_bytes_factor, "
            "the bytes of its state for each byte of parameters (2 for Adam in the parameters' own dtype)."
        ) from error
    state = sum(_num_bytes(value) for value in copy.state.get(trial, {}).values())
    return state / _num_bytes(trial)


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns what the class needs besides the options of a group: nothing but a required learning rate."""
    return {"lr": optimizer.defaults["lr"]} if "lr" in optimizer.defaults else {}


def _num_bytes(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
