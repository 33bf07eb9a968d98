"""Defines `Plan`: which rank runs which part of the graph, when, and what that is predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        blocks: indices into ``Graph.blocks``, ascending.
        ranks: the ordered ranks that are its replicas; micro-batch m runs on ``ranks[m % len(ranks)]``.
        needs_recompute: whether backward runs the forward again.
        in_flight: most forwards not yet backwarded on one replica.
        forward_seconds, backward_seconds: predicted, for one micro-batch.
        memory_bytes: predicted peak on one replica.
    """

    blocks: tuple[int, ...]
    ranks: tuple[int, ...]
    needs_recompute: bool
    in_flight: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    memory_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete plan of a step.

    `predicted_seconds` comes from the simulator; `bound_seconds` is a lower bound on the step over all plans of the
    searched kind, and `bound_proof` says in one sentence how it was proved.
    """

    stages: tuple[StagePlan, ...]
    num_ranks: int
    num_micro_batches: int
    micro_batch_size: float
    schedule: str
    predicted_seconds: float = 0.0
    bound_seconds: float = 0.0
    bound_proof: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def num_stages(self) -> int:
        """The number of stages S."""
        return len(self.stages)

    @property
    def gap(self) -> float:
        """How far the prediction lies above the bound: ``predicted / bound - 1``."""
        return self.predicted_seconds / self.bound_seconds - 1.0 if self.bound_seconds > 0 else 0.0

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Returns the rank that runs a micro-batch at a stage."""
        ranks = self.stages[stage].ranks
        return ranks[micro_batch % len(ranks)]
