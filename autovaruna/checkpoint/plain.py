"""Loads checkpoints into plain PyTorch, on one process without AutoVaruna."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from autovaruna.checkpoint.choose import choose
from autovaruna.checkpoint.load import CheckpointInfo, Loading
from autovaruna.checkpoint.subject import Subject
from autovaruna.runtime.optimizers.optimizer import CutOptimizer
from autovaruna.runtime.weights.materialize import materialize
from autovaruna.runtime.weights.placement import OwnedState
from autovaruna.runtime.worlds.in_process import single_world


def load_checkpoint(
    dir: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | str = "latest",
    scaler: Any = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> CheckpointInfo:
    """Loads a checkpoint into a plain model, on this process alone.

    Args:
        dir: A folder of checkpoints, one of them, a Hugging Face folder, or a safetensors file.
        model: The model; parameters on ``meta`` get memory on the host.
        optimizer: Its optimizer.
        step: The step, or ``"latest"``: the newest that is intact.
        scaler: A GradScaler.
        lr_scheduler: A schedule of the learning rate.
        strict: Whether every name of the model, and no other, must be there.

    Returns:
        What was saved beside the weights.

    Raises:
        CheckpointError: there is none that is intact, or it does not fit; nothing has been changed.
    """
    world = single_world()
    state = OwnedState(model)
    names = {id(state.tensor(name)): name for name in state.places}
    subject = Subject(world, state, optimizer=None if optimizer is None else CutOptimizer(optimizer, names))
    with ExitStack() as claims:
        loading = Loading(choose(world, dir, step, claims))
        loading.check(subject, strict, scaler, lr_scheduler)
        loading.remark(subject, scaler=scaler, lr_scheduler=lr_scheduler)
        load_all(loading, subject, torch.device("cpu"))
        return loading.load_rest(world.rank, scaler, lr_scheduler)


def load_all(loading: Loading, subject: Subject, device: torch.device) -> None:
    """Loads weights and optimizer where one process has the whole model; what is on ``meta`` gets memory."""
    state = subject.state
    if any(state.tensor(name).is_meta for name in state.places):
        materialize(state, state.places, device, 0, given=loading.names(subject))
        if subject.optimizer is not None:
            subject.optimizer.cut(state.parameters())
    loading.load_weights(subject)
    loading.load_optimizer(subject)
