"""Finds the device that a rank computes on, and moves its model, optimizer and inputs there."""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor, nn

from autovaruna._torch import convert_tensors
from autovaruna.config.settings import Settings
from autovaruna.errors import ConfigError
from autovaruna.ranks.environment import local_rank_in

logger = logging.getLogger(__name__)
_FIRST = torch.device("cuda", 0)


def find_device(model: nn.Module, settings: Settings) -> torch.device:
    """Returns where this rank computes: where the setting says or the model is, or a GPU for one on ``meta``."""
    if settings.device != "auto":
        return _named(settings.device)
    tensors = [*model.parameters(), *model.buffers()]
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_meta))
    is_on_meta = bool(tensors) and not devices
    if devices == [_FIRST] or (is_on_meta and torch.cuda.is_available()):
        return _own_gpu()
    return devices[0] if devices else torch.device("cpu")


def move_to_own_device(model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings) -> torch.device:
    """Moves a model's tensors, the same objects, and its optimizer's state to where this rank computes."""
    device = find_device(model, settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    before = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta} - {device}
    if not before or (settings.device == "auto" and before != {_FIRST}):
        return device

    def moves(value: object) -> bool:
        """Whether a part of an optimizer's state goes along; counts of steps on the CPU are to stay there."""
        return isinstance(value, Tensor) and value.device in before and (value.is_cuda or value.dim() > 0)

    logger.info("the model goes from %s to %s, where this rank computes", ", ".join(map(str, before)), device)
    convert_tensors(model, lambda each: each if each.is_meta else each.to(device))
    for state in optimizer.state.values() if optimizer is not None else ():
        state.update({name: each.to(device) for name, each in state.items() if moves(each)})
    return device


def on_own_gpu(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Returns inputs on the GPU of this rank; those that a script has put on another one are copied."""
    if device.type != "cuda":
        return tensors
    return [each.to(device) if each.is_cuda and each.device != device else each for each in tensors]


def _own_gpu() -> torch.device:
    """Returns the current GPU if the script has chosen one, else the one with this rank's number on its host."""
    current, number = torch.cuda.current_device(), local_rank_in(os.environ)
    if current == 0 and number is not None:
        return torch.device("cuda", number % torch.cuda.device_count())
    return torch.device("cuda", current)


def _named(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            torch.cuda.init()
            return _own_gpu()
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device is {name!r}, which cannot be used here: {str(error).splitlines()[0]}. Expected auto, cpu, cuda, "
            "or cuda:0 and so on."
        ) from error
