"""Evaluates a model on batches of any size: the mean loss over all samples of all replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from autovaruna.api import AutoVaruna
from autovaruna.errors import InputError
from autovaruna.graph.call import describe
from autovaruna.runtime.worlds.on_all import on_all
from autovaruna.runtime.worlds.world import World
from autovaruna.varuna.batches import Inputs, loss_of, rows_of


def mean_loss(model: AutoVaruna, inputs: Inputs, batch_size: int, leaders: Sequence[int], world: World) -> float:
    """Returns the mean loss over the samples of all replicas, in eval mode, on every rank. Collective.

    Args:
        model: The wrapped model.
        inputs: This replica's samples.
        batch_size: Most samples that are on their way at once, over all replicas.
        leaders: One rank of each replica.
        world: The ranks.

    Raises:
        InputError: no rank has a sample.
    """
    own = on_all(world, lambda: describe(model.module, (), inputs)[1].batch_size, "reading the inputs to evaluate")
    sizes = world.gather_objects(own, "evaluating")
    if not sum(sizes[rank] for rank in leaders):
        raise InputError("evaluate() got no sample on any rank; expected at least one.")
    num_parts = math.ceil(max(sizes) / math.ceil(batch_size / len(leaders)))
    total, num_samples = 0.0, 0
    with _evaluating(model.module), torch.no_grad():
        for place in range(num_parts):
            bounds = [(size * place // num_parts, size * (place + 1) // num_parts) for size in sizes]
            count = sum(bounds[rank][1] - bounds[rank][0] for rank in leaders)
            if count:
                total += count * loss_of(model(**rows_of(inputs, own, *bounds[world.rank]))).item()
                num_samples += count
    return total / num_samples


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Sets eval mode on every module; afterwards each is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
