"""Describes one call of the model as all ranks see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from autovaruna.planner.records import Plan
from autovaruna.runtime.batch import GlobalBatch
from autovaruna.stage.split import Split


@dataclass(eq=False, slots=True)
class Job:
    """One call of the model, as every rank sees it.

    Attributes:
        split: the stages of the call's graph.
        plan: where each runs.
        batch: its micro-batches.
        needs_gradient: whether backwards follow.
        seed, step: what random nodes depend on.
        graph_key: digest of the graph.
        is_sum: whether losses are added rather than averaged.
        recomputing: stages that run forward again before backward.
        splitting: stages whose backward leaves weight gradients for later.
        offload: whether what they keep for that is on the host meanwhile.
        of_batch: what micro-batches are given of the whole batch, by the weight of their loss and the name of the node.
        name: what to call it in errors.
    """

    split: Split
    plan: Plan
    batch: GlobalBatch
    needs_gradient: bool
    seed: int
    step: int
    graph_key: str
    is_sum: bool
    recomputing: frozenset[int]
    splitting: frozenset[int] = frozenset()
    offload: bool = False
    of_batch: Mapping[float, dict[str, Tensor]] = field(default_factory=dict)
    name: str = "the call"

    def rank_weight(self, rank: int) -> float:
        """Returns the weight of a rank's own loss in that of the global batch: its share of samples, or one."""
        if self.is_sum:
            return 1.0
        return self.batch.num_samples_of(rank) / self.batch.num_samples

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Returns the rank that runs a micro-batch at a stage."""
        return self.plan.rank_of(stage, micro_batch)
