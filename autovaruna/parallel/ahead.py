"""Splits a model ahead of its first call, for an optimizer that is made afterwards, from each rank's own part."""

from __future__ import annotations

from typing import Any

import torch

from autovaruna.errors import InputError, RankError
from autovaruna.parallel.calls import compare_settings
from autovaruna.parallel.wrapper import AutoVaruna
from autovaruna.runtime.optimizers.optimizer import CutOptimizer
from autovaruna.runtime.optimizers.own_part import OwnSteps, with_hooks


def prepare(model: AutoVaruna, *args: Any, **kwargs: Any) -> None:
    """Plans and splits a model now, from a sample of the calls to come. Collective.

    Args:
        model: The wrapped model, in the mode that it will be trained in.
        args, kwargs: Arguments of a call; no number of theirs goes through the model.
    """
    if model._engine is None:
        compare_settings(model.settings, model.world)
        model._start(model._share(args, kwargs))


def adopt(model: AutoVaruna, optimizer: torch.optim.Optimizer) -> None:
    """Takes the optimizer of a model that has been split, made from ``parameters()`` of this rank. Collective.

    Args:
        model: The wrapped model.
        optimizer: Has as many groups as on every other rank.

    Raises:
        InputError: it has parameters that this rank does not hold, or its steps join numbers of several.
        RankError: the ranks' optimizers have different numbers of groups.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"Got a {type(optimizer).__name__} for an optimizer; expected a torch.optim.Optimizer.")
    names = {id(parameter): name for name, parameter in model._state.parameters().items() if not parameter.is_meta}
    error: Exception | None = None
    try:
        cut = CutOptimizer(optimizer, names)
        cut.check()
    except InputError:
        error = InputError(
            "The optimizer has parameters that this rank does not hold. Expected one that was made after wrapping, "
            "from parameters() of the wrapped model."
        )
    model.world.agree(error, "registering the optimizer")
    of_ranks = model.world.gather_objects(cut.names, "registering the optimizer")
    if len({len(groups) for groups in of_ranks}) > 1:
        raise RankError(
            f"The ranks' optimizers have {[len(groups) for groups in of_ranks]} groups of parameters. Expected as many "
            "on every rank; a group may be empty."
        )
    order = {name: place for place, name in enumerate(model._parameter_names)}
    cut.adopt([sorted(set().union(*groups), key=order.__getitem__) for groups in zip(*of_ranks, strict=True)])
    own_steps = OwnSteps(with_hooks(optimizer))
    model._check_steps(cut, own_steps, model.preparation)
    model._optimizer, model._cut_optimizer, model._own_steps = optimizer, cut, own_steps
    model._acts.watch(optimizer, cut.names)
