"""Asks the user's function for the weight of each micro-batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from autovaruna.errors import InputError
from autovaruna.parallel.calls import SharedCall
from autovaruna.runtime.batch import GlobalBatch, MicroBatch
from autovaruna.runtime.worlds.on_all import gather_on_all
from autovaruna.runtime.worlds.world import World


def micro_batch_weights(
    weigh: Callable[..., float] | None, model: nn.Module, shared: SharedCall, batch: GlobalBatch, world: World
) -> tuple[float, ...]:
    """Returns a weight for each micro-batch, in order; empty without a function. Collective.

    Args:
        weigh: The user's ``micro_batch_weight``: gets the arguments of the model by name, cut to one micro-batch.
        model: The model, whose signature names positional arguments.
        shared: The call.
        batch: Its micro-batches.
        world: The ranks.
    """
    if weigh is None:
        return ()

    def weights_of_own() -> dict[int, float]:
        return {part.index: _weight(weigh, model, shared, part) for part in batch.owned_by(world.rank)}

    known: dict[int, float] = {}
    for found in gather_on_all(world, weights_of_own, "weighing micro-batches"):
        known |= found
    return tuple(known[index] for index in batch.micro_batches)


def _weight(weigh: Callable[..., float], model: nn.Module, shared: SharedCall, part: MicroBatch) -> float:
    args, kwargs = shared.call.tree.unflatten(shared.samples(part.start, part.size))
    weight: Any = weigh(dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments))
    number = float(weight)
    if not number >= 0:
        raise InputError(f"micro_batch_weight returned {weight!r}; expected a number of at least zero.")
    return number
