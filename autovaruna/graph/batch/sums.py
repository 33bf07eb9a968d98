"""Refuses to average losses that are sums over the samples, and to add up what is none. Warns of other outputs.

Nothing in a loss's shape tells a sum from a mean, but its last operations do: from the loss back, through what only
scales, adds or reshapes, to where the samples were reduced.
"""

from __future__ import annotations

import logging

from torch import fx

from autovaruna.errors import InputError
from autovaruna.graph.batch.reductions import Reductions
from autovaruna.graph.origin import origin
from autovaruna.graph.outputs import OutputKind
from autovaruna.graph.traced import TracedModel

logger = logging.getLogger(__name__)


def refuse_other_reduction(traced: TracedModel, is_added: bool) -> None:
    """Makes sure that the loss of a graph is no sum over the samples, or nothing else if micro-batches are added up.

    Args:
        traced: The graph.
        is_added: Whether losses of micro-batches are added up, rather than averaged.

    Raises:
        InputError: it is something else; says where it is made, and which setting suits it.
    """
    reductions = Reductions(traced.sizes, traced.batch_inputs, is_added)
    for spec in traced.outputs:
        if spec.kind not in (OutputKind.LOSS, OutputKind.MEAN):
            continue
        node = traced.nodes[spec.node]
        made = reductions.no_sum_in(node) if is_added else reductions.sum_in(node)
        if made is None:
            continue
        if spec.kind is OutputKind.LOSS:
            raise _no_sum(made) if is_added else _sum(made)
        given, other = ("no sum", "sum") if is_added else ("a sum", "mean")
        logger.warning(
            "%s is %s over the samples (%s): got the %s of what micro-batches give. Expected a %s, or the setting "
            "reduction=%r.",
            *(spec.path, given, origin(made) or made.name, other, other, "mean" if is_added else "sum"),
        )


def _sum(made: fx.Node) -> InputError:
    return InputError(
        f"The loss of the model is a sum over the samples, made by {made.name} at {origin(made) or made.name}, but "
        "losses of micro-batches are averaged: got reduction='mean'. Expected a mean, or the setting "
        "reduction='sum', which adds the micro-batches of all ranks up; micro_batch_weight gives each a weight of "
        "its own."
    )


def _no_sum(made: fx.Node) -> InputError:
    return InputError(
        f"The loss of the model is no sum over the samples: {made.name}, at {origin(made) or made.name}, does not grow "
        "with them, but losses of micro-batches are added up: got reduction='sum'. Expected a sum, in which terms of "
        "weights alone count once a sample (multiply them by len(x)); or the setting reduction='mean', for a mean."
    )
