"""Says what a plan takes by another profile, of the same machine at another time or of another machine."""

from __future__ import annotations

from dataclasses import replace

from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.memory.fitting import Option
from autovaruna.planner.problem import Problem
from autovaruna.planner.ranges import RangeTables
from autovaruna.planner.records import Plan


def priced(plan: Plan, problem: Problem) -> Plan:
    """Returns a plan with the seconds and bytes that another problem predicts for it; nothing is searched.

    Args:
        plan: of the problem's graph and batch; its stages, ranks, depths and schedule stay.
        problem: with the profile and the cluster that count.
    """
    starts = [stage.blocks[0] for stage in plan.stages]
    planner = Planner(problem, RangeTables(problem.graph, [*starts, len(problem.graph.blocks)]))
    ranks = tuple(stage.ranks for stage in plan.stages)
    candidate = Candidate(tuple(range(plan.num_stages)), ranks, plan.num_micro_batches, schedule=plan.schedule)
    sized = planner.sized(plan.num_micro_batches)
    options = [
        Option(sized.held_by(s, s + 1), each.ranks, each.in_flight, each.in_flight, each.needs_recompute, each.deferred)
        for s, each in enumerate(plan.stages)
    ]
    whole = planner.predict_whole(planner.put_together(candidate, options))
    return replace(whole, is_measured=problem.profile.is_measured)
