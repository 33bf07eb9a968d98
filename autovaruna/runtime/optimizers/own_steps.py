"""Lets every optimizer of a model that is split step over this rank's part, if that gives the numbers of plain PyTorch.

An optimizer whose steps join numbers of several parameters is refused. One that cannot be tried out steps over all
parameters, of which some are elsewhere: whatever it joins then raises.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autovaruna.errors import InputError
from autovaruna.profiler.separable import Steps, steps_of
from autovaruna.runtime.optimizers.optimizer import CutOptimizer
from autovaruna.runtime.optimizers.own_part import OwnSteps
from autovaruna.runtime.weights.elsewhere import Elsewhere
from autovaruna.runtime.weights.split_models import split_models

logger = logging.getLogger(__name__)
_known: WeakSet[Optimizer] = WeakSet()
_is_watching = False
_one_at_a_time = Lock()


def step_over_own_part(optimizer: Optimizer, own: OwnSteps, num_ranks: int, device: torch.device) -> None:
    """Cuts the steps of an optimizer down to this rank's part of its parameters.

    Args:
        optimizer: The optimizer, some of whose parameters are not on every rank.
        own: What cuts them down.
        num_ranks: How many ranks there are.
        device: Where it steps.

    Raises:
        InputError: its steps join numbers of several parameters, or draw random numbers.
    """
    steps = steps_of(optimizer, device)
    if steps.kind in ("joint", "random"):
        raise InputError(_refusal(type(optimizer).__name__, steps, num_ranks))
    own.is_on = steps.kind == "separate"
    if not own.is_on:
        logger.warning(
            "cannot try out whether %s updates each parameter by itself (%s): each rank steps over all parameters, "
            "and what joins numbers of several ranks will raise",
            type(optimizer).__name__,
            steps.what,
        )
    _known.add(optimizer)


def watch_later_optimizers() -> None:
    """Does the same for other optimizers that have parameters that are elsewhere, at the first step of each."""
    global _is_watching
    with _one_at_a_time:  # ranks may be threads
        if not _is_watching:
            register_optimizer_step_pre_hook(_note)
            _is_watching = True


def _note(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _known:
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    away = [each for each in parameters if isinstance(each, Elsewhere)]
    if away:
        home = away[0].home
        step_over_own_part(optimizer, OwnSteps(optimizer), 1 + max(home.rank, *home.ranks), home.device)
        _show_whole_state(optimizer, parameters)


def _show_whole_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Lets the optimizer's own methods give and take the state of all parameters, if they are of one model."""
    for model in split_models():
        names = model.names()
        if all(id(each) in names for each in parameters):
            cut = CutOptimizer(optimizer, names)
            cut.cut(model.parameters())
            rank = model.world.rank
            optimizer.state_dict = partial(cut.state_dict, model.placement, model.world)  # type: ignore[method-assign]
            optimizer.load_state_dict = partial(  # type: ignore[method-assign]
                cut.load_state_dict, placement=model.placement, rank=rank
            )


def _refusal(name: str, steps: Steps, num_ranks: int) -> str:
    """Returns what to say to an optimizer that would step otherwise than in plain PyTorch."""
    does = "joins numbers of several parameters" if steps.kind == "joint" else "draws random numbers"
    return (
        f"{name} {does} in its steps, and the plan splits the model, so that no rank holds all parameters: got an "
        f"optimizer that was tried out, where {steps.what}. Expected one that updates each parameter by its own "
        f"numbers alone; or pass num_stages=1 and num_replicas={num_ranks}, so that every rank holds them all; or, if "
        "it clips by a norm of all gradients, turn that off and call model.clip_grad_norm_() before its step."
    )
