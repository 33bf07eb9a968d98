"""Defines `Problem`: everything that a plan depends on, and `Constraints`: what the user has already decided."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from autovaruna.errors import PlanError
from autovaruna.graph.records import Graph
from autovaruna.planner.arrays import CostTable, Flow
from autovaruna.profiler.records import Cluster, OptimizerCost, Profile

FEW_RANKS = 12
"""Of more ranks not every number of replicas, and not every place of a rank, is tried."""
_STAGES_OF_FEW_RANKS, _STAGES_OF_MANY_RANKS = 4, 8
"""The most stages of a rank: what fills a pipeline of few ranks is little beside the rest of a step."""
RECOMPUTE_CHOICES = ("auto", "all", "none")


@dataclass(frozen=True, slots=True)
class Constraints:
    """What the user has already decided; 0 or empty leaves the choice to the planner.

    Attributes:
        num_replicas: the number of replicas of every stage.
        num_micro_batches: the number of micro-batches M of the whole global batch.
        micro_batch_size: samples of a micro-batch (used when `num_micro_batches` is 0).
        min_micro_batches, max_micro_batches: the range of M that is searched.
        recompute: ``auto`` decides for each stage, ``all`` and ``none`` for all of them.
        schedule: the name of a policy, or ``auto``.
        in_flight: the in-flight depth of every stage.
        cuts: the first block of each stage but the first: a block name, or a module path (its first block).
        simplicity: the share of the fastest step that a plan may take longer if it is simpler; 0: the fastest plan.
        max_stages_per_rank: the most stages of a rank; 0: as many as pay, up to `most_stages_per_rank`.
        cutpoints: ``only`` cuts at the user's cut points alone, ``prefer`` there unless elsewhere is better by more
            than `PREFER_MARGIN` or no cut there fits, ``ignore`` anywhere.
    """

    num_stages: int = 0
    num_replicas: int = 0
    num_micro_batches: int = 0
    micro_batch_size: int = 0
    min_micro_batches: int = 1
    max_micro_batches: int = 0
    recompute: str = "auto"
    schedule: str = "auto"
    in_flight: int = 0
    cuts: tuple[str, ...] = ()
    stage_ranks: tuple[tuple[int, ...], ...] = ()
    simplicity: float = 0.0
    max_stages_per_rank: int = 0
    cutpoints: str = "ignore"


@dataclass(frozen=True)
class Problem:
    """A graph, what it costs, the ranks to run it on, and how.

    Attributes:
        global_batch_size: samples of all ranks together.
        optimizer_bytes_factor: bytes of optimizer state for each byte of a trained parameter (AdamW: 2).
        shares_state: whether the replicas of a stage share the optimizer's state.
        needs_gradient: False for a model that only runs forward.
        min_micro_batches_for_inputs: least M with which every rank can pass its own mini-batch (N, or 1).
        input_groups: the ranks that pass the same mini-batch; empty: not known, so that nothing is said of exchange.
        has_loss: whether the model returns the loss that a step starts from; else the script makes it of its outputs.
        delivers_outputs: whether ranks get outputs of their samples beside such a loss.
    """

    graph: Graph
    profile: Profile
    cluster: Cluster
    global_batch_size: int
    optimizer_bytes_factor: float = 0.0
    optimizer_cost: OptimizerCost = field(default=OptimizerCost())
    needs_gradient: bool = True
    min_micro_batches_for_inputs: int = 1
    constraints: Constraints = field(default_factory=Constraints)
    shares_state: bool = False
    input_groups: tuple[tuple[int, ...], ...] = ()
    has_loss: bool = True
    delivers_outputs: bool = True

    @property
    def most_owners(self) -> int:
        """The most ranks that the optimizer's state of a stage may be shared out over."""
        return (self.constraints.num_replicas or self.cluster.num_ranks) if self.shares_state else 1

    @cached_property
    def cost_table(self) -> CostTable:
        """What the profile says, as arrays."""
        return CostTable(self.profile)

    @cached_property
    def flow(self) -> Flow:
        """Where all values of the graph go."""
        return Flow(self.graph.values, len(self.graph.blocks))

    @cached_property
    def gradient_flow(self) -> Flow:
        """Where the values go that need a gradient, which comes back; none do without a backward."""
        values = tuple(value for value in self.graph.values if value.needs_gradient and self.needs_gradient)
        return Flow(values, len(self.graph.blocks))


def forced_stages(problem: Problem) -> int:
    """Returns the number of stages that the user has decided on, in whatever way; 0: none."""
    constraints = problem.constraints
    from_cuts = len(constraints.cuts) + 1 if constraints.cuts else 0
    return len(constraints.stage_ranks) or constraints.num_stages or from_cuts


def most_stages_per_rank(problem: Problem) -> int:
    """Returns the most stages that a rank may get."""
    most = _STAGES_OF_FEW_RANKS if problem.cluster.num_ranks <= FEW_RANKS else _STAGES_OF_MANY_RANKS
    return problem.constraints.max_stages_per_rank or most


def check_problem(problem: Problem) -> None:
    """Raises `PlanError` for a problem that contradicts itself, naming what does."""
    for complaint in (_data_complaint(problem), _count_complaint(problem), _ranks_complaint(problem)):
        if complaint:
            raise PlanError(complaint)


def micro_batch_range(problem: Problem) -> tuple[int, int]:
    """Returns the least and the greatest M that the settings and the batch allow; raises PlanError if none is left."""
    constraints, batch = problem.constraints, problem.global_batch_size
    inputs = problem.min_micro_batches_for_inputs
    forced = constraints.num_micro_batches
    if not forced and constraints.micro_batch_size:
        forced = max(math.ceil(batch / constraints.micro_batch_size), min(inputs, batch))
    low = forced or max(constraints.min_micro_batches, inputs, 1)
    high = forced or min(constraints.max_micro_batches or batch, batch)
    if forced and forced < inputs:
        raise PlanError(
            f"num_micro_batches is {forced}, but each of {inputs} ranks passes its own mini-batch, and a micro-batch "
            f"is a slice of one of them: set it to {inputs} or more, or pass inputs='replicated'"
        )
    if low > high:
        raise PlanError(
            f"no number of micro-batches is left: at least {low} are needed (one for each rank that passes a "
            f"mini-batch, min_micro_batches), at most {high} are possible (max_micro_batches, or one sample each of a "
            f"global batch of {batch}): use a larger batch, or fewer ranks"
        )
    if forced > batch:
        raise PlanError(f"num_micro_batches is {forced}, but the global batch has only {batch} samples: lower it")
    return low, high


def _data_complaint(problem: Problem) -> str:
    graph, profile = problem.graph, problem.profile
    if not graph.blocks:
        return "the graph has no block: there is nothing to plan"
    if problem.global_batch_size < 1:
        return f"global_batch_size is {problem.global_batch_size}, expected 1 or more"
    if profile.fingerprint != graph.fingerprint:
        return f"the profile is of graph {profile.fingerprint!r}, not of {graph.fingerprint!r}: measure this model"
    if not profile.costs or any(len(costs) != len(graph.blocks) for costs in profile.costs):
        return f"the profile does not hold a cost for each of the {len(graph.blocks)} blocks: measure this model"
    return ""


def _count_complaint(problem: Problem) -> str:
    constraints, graph = problem.constraints, problem.graph
    if constraints.recompute not in RECOMPUTE_CHOICES:
        return f"recompute is {constraints.recompute!r}, expected one of {', '.join(RECOMPUTE_CHOICES)}"
    if constraints.num_stages > len(graph.blocks):
        return (
            f"num_stages is {constraints.num_stages}, but the model has only {len(graph.blocks)} blocks, and a stage "
            f"needs one: set it to {len(graph.blocks)} or less"
        )
    counts = {"num_stages": constraints.num_stages, "cuts": len(constraints.cuts) and len(constraints.cuts) + 1}
    counts["stage_ranks"] = len(constraints.stage_ranks)
    given = {name: count for name, count in counts.items() if count}
    if len(set(given.values())) > 1:
        said = ", ".join(f"{name} asks for {count} stages" for name, count in given.items())
        return f"the settings contradict each other: {said}"
    return ""


def _ranks_complaint(problem: Problem) -> str:
    constraints, num_ranks = problem.constraints, problem.cluster.num_ranks
    for stage, ranks in enumerate(constraints.stage_ranks):
        if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < num_ranks for rank in ranks):
            return (
                f"stage_ranks[{stage}] is {list(ranks)}, expected one or more different ranks from 0 to {num_ranks - 1}"
            )
        if constraints.num_replicas and len(ranks) != constraints.num_replicas:
            return (
                f"stage_ranks[{stage}] names {len(ranks)} ranks, but num_replicas is {constraints.num_replicas}: "
                f"drop one of the two settings"
            )
    return "" if constraints.stage_ranks else _few_ranks_complaint(problem)


def _few_ranks_complaint(problem: Problem) -> str:
    """Returns what is wrong if stages and replicas need more ranks than there are, several stages a rank included."""
    constraints, num_ranks = problem.constraints, problem.cluster.num_ranks
    stages, replicas = max(forced_stages(problem), 1), max(constraints.num_replicas, 1)
    num_groups, most = num_ranks // replicas, most_stages_per_rank(problem)
    if stages <= num_groups or (num_groups > 1 and stages <= num_groups * most):
        return ""
    fewest = max(2, math.ceil(stages / most)) * replicas
    on_fewer = (
        f", or {fewest} with up to {most} stages a rank (max_stages_per_rank)" if fewest < stages * replicas else ""
    )
    return (
        f"{stages * replicas} ranks are needed (num_stages or cuts, times num_replicas){on_fewer}, but there are "
        f"{num_ranks}: lower num_stages or num_replicas, or say with stage_ranks which rank holds which stages"
    )
