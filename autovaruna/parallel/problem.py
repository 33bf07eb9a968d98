"""Says what the planner is asked for: settings, a traced model and a batch in, what may be chosen out."""

from __future__ import annotations

import torch

from autovaruna.graph.traced import TracedModel
from autovaruna.planner import Constraints
from autovaruna.planner.problem import SPLIT_SCHEDULE
from autovaruna.settings import Settings

SHAPING = (
    "num_stages",
    "max_stages_per_rank",
    "num_replicas",
    "num_micro_batches",
    "micro_batch_size",
    "min_micro_batches",
    "max_micro_batches",
    "recompute",
    "schedule",
    "in_flight",
    "cuts",
    "cutpoints",
    "stage_ranks",
    "inputs",
    "dynamic_batch",
)
"""The settings that shape a plan; a saved one is valid for their values."""

_MICRO_BATCHES_EACH = 4
_SPLIT_RANKS = 4


def needs_gradient(traced: TracedModel) -> bool:
    """Whether a step goes backward."""
    return torch.is_grad_enabled() and traced.needs_gradient


def constraints_of(settings: Settings, traced: TracedModel, num_mini_batches: int) -> Constraints:
    """Returns what the settings leave to the planner.

    Args:
        settings: The settings.
        traced: The model.
        num_mini_batches: Mini-batches of a step; each is one micro-batch or more.
    """
    has_loss = traced.loss is not None or not needs_gradient(traced)
    return Constraints(
        num_stages=settings.num_stages,
        max_stages_per_rank=settings.max_stages_per_rank,
        num_replicas=settings.num_replicas,
        num_micro_batches=settings.num_micro_batches,
        micro_batch_size=settings.micro_batch_size,
        min_micro_batches=settings.min_micro_batches,
        max_micro_batches=_most(settings, num_mini_batches),
        may_exceed_max=settings.source_of("max_micro_batches") == "default",
        recompute=settings.recompute,
        schedule=settings.schedule if has_loss else "gpipe",  # all forwards come before the caller's backward
        in_flight=settings.in_flight if has_loss else 0,
        cuts=settings.cuts,
        cutpoints=settings.cutpoints,
        stage_ranks=settings.stage_ranks,
        may_split=settings.compile_stages is False,
    )


def splits_backward(settings: Settings, num_ranks: int) -> bool:
    """Whether plans that compute weight gradients apart are looked for: of few ranks they gain too little.

    Args:
        settings: The settings.
        num_ranks: Ranks of the job.
    """
    is_wanted = settings.schedule == SPLIT_SCHEDULE or (settings.schedule == "auto" and num_ranks >= _SPLIT_RANKS)
    return is_wanted and settings.compile_stages is False


def sizes_to_measure(
    settings: Settings, traced: TracedModel, global_batch_size: int, num_mini_batches: int
) -> list[int]:
    """Returns micro-batch sizes that span those a plan may choose; arguments as above."""
    if not settings.dynamic_batch:
        return [traced.sizes.batch_size]
    if settings.micro_batch_size:
        return [min(settings.micro_batch_size, global_batch_size)]
    if settings.num_micro_batches:
        return [max(1, round(global_batch_size / settings.num_micro_batches))]
    largest = max(1, global_batch_size // num_mini_batches)
    return sorted({max(1, largest // 4), largest})


def _most(settings: Settings, num_mini_batches: int) -> int:
    """Returns the most micro-batches; the default grows with the ranks, each of which passes a mini-batch."""
    most = settings.max_micro_batches
    if most and settings.source_of("max_micro_batches") == "default":
        return max(most, _MICRO_BATCHES_EACH * num_mini_batches)
    return most
