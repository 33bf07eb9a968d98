"""Says what no plan of a candidate beats in the memory that there is, whatever its depths, recompute and schedule.

A stage that has room for few micro-batches, or has to recompute to have any, waits for each of them: a plan whose
stages alone may be fast is often much slower. A stage runs without recompute, as deep as it fits, or with it if it goes
deeper then; the plan whose stages run so with the least bound is the one to begin with.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

from autovaruna.planner.candidate import DEEPEST, Candidate, Planner
from autovaruna.planner.memory.fitting import Option, fit
from autovaruna.planner.records import Plan
from autovaruna.planner.sized import Sized

_MOST_PLANS = 64


def deepest(planner: Planner, variant: Candidate, known: float) -> tuple[float, Candidate, Plan] | None:
    """Returns the least bound of a candidate's plans, and what has it: a variant and a plan that fits by its depths.

    Args:
        planner: of the problem.
        variant: one of the candidate's variants, with one stage a rank.
        known: what its stages take, whatever the memory.

    Returns:
        None if the candidate fits in no way.
    """
    sized, variant = planner.sized(variant.num_micro_batches), _deep(planner, variant)
    options = planner.options(sized, variant)
    ways = [_ways(planner, sized, option) for option in options]
    if math.prod(map(len, ways)) > _MOST_PLANS:
        plan = planner.build(variant)
        return (known, variant, plan) if plan else None
    best = None
    for chosen in product(*ways):
        # What is deferred costs depth, and may be worth it: as if it cost none.
        eased = [each._replace(deferred=option.deferred) for each, option in zip(chosen, options, strict=True)]
        bound = planner.predictor.bound_at_depths(planner.pipeline(planner.put_together(variant, eased)))
        if best is None or bound < best[0]:
            best = bound, chosen
    return (best[0], variant, planner.put_together(variant, best[1])) if best else None


def _deep(planner: Planner, variant: Candidate) -> Candidate:
    """Returns the variant with as much in flight as there is memory for, unless that is given."""
    constraints = planner.problem.constraints
    schedule = "1f1b" if constraints.schedule == "auto" else variant.schedule
    return replace(variant, schedule=schedule, depth=variant.depth if constraints.in_flight else DEEPEST)


def _ways(planner: Planner, sized: Sized, option: Option) -> list[Option]:
    """Returns how a stage may run: without recompute as deep as it fits, and with it if it goes deeper then."""
    ways: list[Option] = []
    for again in sized.recompute_choices:
        open_option = option._replace(needs_recompute=again, spares_recompute=True)
        fitted = fit(sized, [open_option], planner.problem.cluster.memory_bytes)
        if fitted and all(fitted[0].in_flight > way.in_flight for way in ways):
            ways += fitted
    return ways
