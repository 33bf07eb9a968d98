"""Turns one point of the search, a `Candidate`, into a plan: memory, recompute, depths, times, prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

import numpy as np

from autovaruna.planner.arrays import RangeTables
from autovaruna.planner.costs import SizedProblem, StageFormula
from autovaruna.planner.exchange import Exchange, engine_seconds
from autovaruna.planner.prediction import Edges, Predictor, least_acts, pipeline_of, policy_of
from autovaruna.planner.problem import Problem
from autovaruna.planner.rank_memory import Choices, Option, bytes_of_ranks, fit, peak_of
from autovaruna.planner.records import BlockBytes, Plan, StagePlan
from autovaruna.schedule.pipeline import Instruction, Kind, Pipeline, latency_depth, textbook_depth

_ACTS_OF_A_CANDIDATE = 100
"""What it takes to look at one, or to fit one into memory, counted in acts of the simulator."""
DEPTHS = {"textbook": textbook_depth, "latency": latency_depth}
DEEPEST = "deepest"
"""As deep as memory allows without recompute, or with it where that is needed at any depth."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Where the stages start (in segments), their ranks, and M; `depth` and `schedule` are names.

    Attributes:
        choices: what each stage holds, in place of a rule for depths that memory bounds; empty: nothing.
        is_fixed: whether this depth and this schedule alone are to be tried, not all that there are.
    """

    starts: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    num_micro_batches: int
    depth: str = "textbook"
    schedule: str = "1f1b"
    choices: tuple[Choices, ...] = ()
    is_fixed: bool = False

    @property
    def is_interleaved(self) -> bool:
        """Whether ranks hold several stages."""
        return len(set().union(*self.ranks)) < sum(map(len, self.ranks))

    def opened(self) -> Candidate:
        """Returns the candidate without what it says of depths, schedule and what stages hold."""
        return Candidate(self.starts, self.ranks, self.num_micro_batches)


class Planner:
    """Builds and predicts the plans of one problem; counts what that costs."""

    def __init__(self, problem: Problem, tables: RangeTables) -> None:
        self.problem, self.tables, self.limits = problem, tables, problem.cluster.memory_bytes
        self.predictor, self.edges = Predictor(), Edges(problem.graph)
        self.exchange = Exchange(problem)
        self._last: tuple[Plan | None, Pipeline | None] = None, None
        hosts = problem.cluster.hosts
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        self.host_of = tuple(numbers[host] for host in hosts) if len(numbers) > 1 else ()
        self.speeds = problem.cluster.speeds if set(problem.cluster.speeds) != {1.0} else ()
        # A search goes back and forth between a few numbers of micro-batches.
        self.sized = lru_cache(maxsize=8)(lambda count: SizedProblem(problem, tables, count))
        self.formula = lru_cache(maxsize=1)(lambda count: StageFormula(self.sized(count)))
        self.tied = [p for p in problem.graph.parameters if p.needs_gradient and len(p.blocks) > 1]

    @property
    def num_acts(self) -> float:
        """What the search took so far, in acts of the simulator: a count, so that it is the same everywhere."""
        return self.predictor.num_acts

    def count_candidate(self) -> float:
        """Counts a candidate that is looked at or built, and returns `num_acts`."""
        self.predictor.num_acts += _ACTS_OF_A_CANDIDATE
        return self.num_acts

    def acts_of(self, candidate: Candidate) -> float:
        """Returns the acts that the simulation of a candidate takes at least."""
        return least_acts([len(ranks) for ranks in candidate.ranks], candidate.num_micro_batches)

    def build(self, candidate: Candidate, limits: Sequence[float] = ()) -> Plan | None:
        """Returns the plan of a candidate without a prediction, None if it does not fit (the cluster, or limits)."""
        sized = self.sized(candidate.num_micro_batches)
        self.count_candidate()
        options = fit(sized, self.options(sized, candidate), limits or self.limits)
        return None if options is None else self.put_together(candidate, options)

    def put_together(self, candidate: Candidate, options: Sequence[Option]) -> Plan:
        """Returns the plan of a candidate whose recompute and depths are known, without a prediction."""
        sized, cluster, problem = self.sized(candidate.num_micro_batches), self.problem.cluster, self.problem
        reduce = self._reduce_seconds(sized, candidate, options)
        return Plan(
            stages=tuple(self._stage(sized, candidate, s, option, reduce[s]) for s, option in enumerate(options)),
            num_ranks=cluster.num_ranks,
            num_micro_batches=candidate.num_micro_batches,
            micro_batch_size=sized.micro_batch_size,
            schedule=candidate.schedule,
            local_link=cluster.local_link,
            remote_link=cluster.remote_link,
            host_of=self.host_of,
            overhead_seconds=cluster.overhead_seconds,
            cores_per_rank=cluster.cores_per_rank,
            needs_gradient=problem.needs_gradient,
            shares_state=problem.shares_state,
        )

    def fixed_options(self, candidate: Candidate) -> list[Option]:
        """Returns the stages of a candidate that says what they hold."""
        sized = self.sized(candidate.num_micro_batches)
        options = []
        for s, (ranks, (again, depth)) in enumerate(zip(candidate.ranks, candidate.choices, strict=True)):
            held = sized.held_by(*_range(candidate, s, self.tables))
            options.append(Option(held, ranks, depth, depth, again))
        return options

    def pipeline(self, plan: Plan) -> Pipeline:
        """Returns the plan as the simulator sees it; that of the last one again, if only the schedule is another."""
        last, pipeline = self._last
        if last is None or pipeline is None or replace(last, schedule=plan.schedule) != plan:
            pipeline = pipeline_of(plan, self.problem.graph, self.edges)
            self._last = plan, pipeline
        return pipeline

    def bound(self, plan: Plan) -> float:
        """Returns seconds that the stages of a plan cannot beat with any depths and any schedule."""
        return self.predictor.bound(self.pipeline(plan))

    def predict(self, plan: Plan, below: float = float("inf")) -> Plan | None:
        """Returns the plan with its predicted seconds, or None if it is not faster than `below`."""
        pipeline = self.pipeline(plan)
        more = self._more_seconds(plan, pipeline)
        seconds = more + self.predictor.step_seconds(pipeline, policy_of(plan.schedule), below - more)
        return replace(plan, predicted_seconds=seconds) if seconds < below else None

    def predict_whole(self, plan: Plan, *, is_quick: bool = False) -> Plan:
        """Returns the plan with its predicted seconds and memory, from all ranks if parts differ and are not many.

        If `is_quick`, one part is enough even where they differ: some ranks may hold a little more.
        """
        policy, of_plan = policy_of(plan.schedule), self.pipeline(plan)
        pipeline, simulation = self.predictor.whole(of_plan, policy, is_quick=is_quick)
        sized, kinds = self.sized(plan.num_micro_batches), product(range(plan.num_stages), Kind)
        alike = {(stage, kind): Instruction(stage, kind, 0) for stage, kind in kinds}  # memory asks no micro-batch
        rows = tuple([tuple([alike[act[2].stage, act[3]] for act in acts]) for acts in simulation.acts])
        places = np.searchsorted(self.tables.positions, [stage.blocks[0] for stage in plan.stages]).tolist()
        held = [sized.held_by(i, j) for i, j in pairwise([*places, self.tables.num_segments])]
        own = self.problem.cluster.own_process_bytes
        needed = bytes_of_ranks(plan, held, sized.model, pipeline, rows, own)
        seconds = simulation.step_seconds + self._more_seconds(plan, of_plan)
        return replace(plan, predicted_seconds=seconds, rank_memory_bytes=needed)

    def _more_seconds(self, plan: Plan, pipeline: Pipeline) -> float:
        """Returns what a step takes beside its pipeline."""
        is_counted = self.problem.profile.device.startswith("cpu")  # elsewhere it runs beside the device
        return self.exchange.seconds(plan) + (engine_seconds(pipeline) if is_counted else 0.0)

    def with_block_bytes(self, plan: Plan) -> Plan:
        """Returns the plan with the bytes of each block that its memory was predicted from."""
        sized = self.sized(plan.num_micro_batches)
        model, costs = sized.model, sized.greatest_costs
        saved, work = tuple(costs.saved_bytes.tolist()), tuple(costs.work_bytes.tolist())
        rules = (model.process_bytes, model.fragmentation, model.work_of_all, model.work_of_largest)
        return replace(plan, block_bytes=BlockBytes(int(costs.micro_batch_size), saved, work, *rules))

    def options(self, sized: SizedProblem, candidate: Candidate) -> list[Option]:
        """Returns the stages of a candidate as they are before they are fitted into memory."""
        counts = [len(ranks) for ranks in candidate.ranks]
        first_choice = sized.recompute_choices[0]
        is_fixed = self.problem.constraints.in_flight or candidate.schedule == "gpipe"
        options = []
        for s, ranks in enumerate(candidate.ranks):
            held, depth = sized.held_by(*_range(candidate, s, self.tables)), self._depth(candidate, s, counts)
            least = depth if is_fixed else 1
            options.append(Option(held, ranks, depth, least, first_choice, candidate.depth == DEEPEST))
        return options

    def _depth(self, candidate: Candidate, stage: int, counts: Sequence[int]) -> int:
        share = -(-candidate.num_micro_batches // counts[stage])
        if candidate.schedule == "gpipe":
            return share
        if candidate.depth == DEEPEST:
            is_alone = stage == len(counts) - 1 and not candidate.is_interleaved
            return 1 if is_alone else share  # it goes backward right after each forward
        forced = self.problem.constraints.in_flight
        return min(forced or DEPTHS[candidate.depth](len(counts), stage, counts), share)

    def _stage(self, sized: SizedProblem, candidate: Candidate, stage: int, option: Option, reduce: float) -> StagePlan:
        i, j = _range(candidate, stage, self.tables)
        key = i, j, option.ranks, option.needs_recompute, option.in_flight, reduce
        made = sized.made_stages.get(key)
        if made is None:
            made = sized.made_stages[key] = self._new_stage(sized, i, j, option, reduce)
        return made

    def _new_stage(self, sized: SizedProblem, i: int, j: int, option: Option, reduce: float) -> StagePlan:
        first, end = int(self.tables.positions[i]), int(self.tables.positions[j])
        (forward, backward), peak = sized.seconds_of(i, j), peak_of(sized, option)
        optimizer = float(sized.optimizer_seconds_at((i, j)))
        speeds = tuple(map(self.speeds.__getitem__, option.ranks)) if self.speeds else ()
        lead = sized.lead_seconds(len(option.ranks), is_local=sized.all_reduces.is_local(option.ranks))
        return StagePlan(
            blocks=tuple(range(first, end)),
            ranks=option.ranks,
            needs_recompute=option.needs_recompute,
            in_flight=option.in_flight,
            forward_seconds=forward,
            backward_seconds=backward if self.problem.needs_gradient else 0.0,
            memory_bytes=peak.num_bytes,
            shared_bytes=peak.shared_bytes,
            recompute_seconds=forward if option.needs_recompute else 0.0,
            reduce_seconds=reduce,
            optimizer_seconds=optimizer * sized.owned_share(len(option.ranks), option.held),
            parameter_bytes=option.held.parameters,
            speeds=speeds if set(speeds) != {1.0} else (),
            reduce_lead_seconds=float(lead[i, j]),
        )

    def _reduce_seconds(self, sized: SizedProblem, candidate: Candidate, options: Sequence[Option]) -> list[float]:
        """Returns the all-reduce seconds of each stage: of its own parameters, and of those it shares with others."""
        if not self.problem.needs_gradient:
            return [0.0] * len(options)
        seconds = [self._reduce_seconds_of(sized, o) for o in options]
        firsts = self.tables.positions[list(candidate.starts)]
        for parameter in self.tied:
            stages = {int(s) for s in np.searchsorted(firsts, parameter.blocks, side="right") - 1}
            ranks = {rank for stage in stages for rank in options[stage].ranks}
            if len(stages) > 1:
                for stage in stages:
                    seconds[stage] += sized.all_reduces.seconds(tuple(ranks), parameter.num_bytes)
        return seconds

    def _reduce_seconds_of(self, sized: SizedProblem, option: Option) -> float:
        """Returns the seconds to sum a stage's gradients; where state is shared, and to give weights back."""
        if not option.held.trained:
            return 0.0
        again = sized.all_reduces.seconds(option.ranks, 0.0) if self.problem.shares_state else 0.0
        return again + sized.all_reduces.seconds(option.ranks, option.held.trained)


def _range(candidate: Candidate, stage: int, tables: RangeTables) -> tuple[int, int]:
    starts, behind = candidate.starts, stage + 1
    return starts[stage], starts[behind] if behind < len(starts) else tables.num_segments
