"""Refuses to average losses that are sums over the samples: micro-batches must add those up. Warns of other outputs.

Nothing in a loss's shape tells a sum from a mean, but its last operations do: from the loss back, through what only
scales, adds or reshapes, to where the samples were reduced.
"""

from __future__ import annotations

import logging

from autovaruna.errors import InputError
from autovaruna.graph.batch.reductions import Reductions
from autovaruna.graph.origin import origin
from autovaruna.graph.outputs import OutputKind
from autovaruna.graph.traced import TracedModel

logger = logging.getLogger(__name__)


def refuse_sum(traced: TracedModel) -> None:
    """Makes sure that the loss of a graph is no sum over the samples.

    Raises:
        InputError: it is one; says where it is made, and which setting adds the micro-batches up.
    """
    reductions = Reductions(traced.sizes, traced.batch_inputs)
    for spec in traced.outputs:
        made = reductions.sum_in(traced.nodes[spec.node]) if spec.kind in (OutputKind.LOSS, OutputKind.MEAN) else None
        if made is None:
            continue
        if spec.kind is OutputKind.MEAN:
            logger.warning(
                "%s is a sum over the samples (%s): got the mean of what micro-batches give. Expected a mean, or "
                "the setting reduction='sum', which adds micro-batches up.",
                *(spec.path, origin(made) or made.name),
            )
            continue
        raise InputError(
            f"The loss of the model is a sum over the samples, made by {made.name} at {origin(made) or made.name}, but "
            "losses of micro-batches are averaged: got reduction='mean'. Expected a mean, or the setting "
            "reduction='sum', which adds the micro-batches of all ranks up; micro_batch_weight gives each a weight of "
            "its own."
        )
