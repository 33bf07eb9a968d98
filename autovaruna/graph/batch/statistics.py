"""Refuses micro-batches that are too small for the statistics of a batch normalisation, as plain PyTorch does.

PyTorch checks this outside of the operations, so the check is not in a traced graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from autovaruna.errors import InputError
from autovaruna.graph.traced import TracedModel

_TRAINING = 5
"""Place of the argument of ``aten.batch_norm`` that says whether it computes statistics."""


def refuse_single_values(traced: TracedModel, sizes: Iterable[int]) -> None:
    """Makes sure that every batch normalisation sees more than one value per channel.

    Args:
        traced: The graph.
        sizes: Samples of its micro-batches.

    Raises:
        InputError: a micro-batch leaves a channel with one value, whose variance is not a number.
    """
    smallest = min(sizes)
    for node in traced.module.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default):
        batch, channels, *others = traced.sizes.shape(node.args[0].meta["val"], smallest)
        if node.args[_TRAINING] and batch * math.prod(others) == 1:
            raise InputError(
                f"A micro-batch has {smallest} sample, which leaves {node.name} one value for each of {channels} "
                "channels; in training a batch normalisation needs more. Pass larger mini-batches, ask for fewer "
                "micro-batches, or leave out the last batch of an epoch (drop_last=True)."
            )
