"""Says why no plan fits: what is missing, where, and what would help; finds the splits that do fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, groupby, islice, pairwise
from typing import NamedTuple

import numpy as np

from autovaruna.errors import PlanError
from autovaruna.log import readable
from autovaruna.planner.arrays import Array, RangeTables
from autovaruna.planner.candidate import Candidate
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.partition import partition_chain
from autovaruna.planner.problem import FEW_RANKS, Problem, forced_stages
from autovaruna.planner.search_space import Ranks, cut_positions


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ranks in short: ``0-3, 6``, and ``0-96 by 32`` for those that lie apart evenly."""
    steps = {other - rank for rank, other in pairwise(ranks)}
    if len(ranks) > 3 and len(steps) == 1 and min(steps) > 1:
        return f"{ranks[0]}-{ranks[-1]} by {steps.pop()}"
    numbered = groupby(enumerate(ranks), key=lambda each: each[1] - each[0])  # constant along a run
    runs = [[rank for _, rank in run] for _, run in numbered]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


class _Split(NamedTuple):
    """A split over some ranks whose greatest lack of memory is least, and the bytes that each rank needs."""

    ranks: Ranks
    starts: tuple[int, ...]
    needed: dict[int, float]

    def missing_bytes(self, limits: Sequence[float]) -> float:
        """Returns what the rank lacks that lacks most."""
        return max(0.0, *(num_bytes - limits[rank] for rank, num_bytes in self.needed.items()))


def exceeds_all(sized: SizedProblem) -> bool:
    """Says whether parameters, gradients and optimizer state alone are more than ranks have: then no plan fits."""
    model, n, limits = sized.model, sized.tables.num_segments, sized.problem.cluster.memory_bytes
    largest = max(model.fixed(sized.held_by(k, k + 1)) for k in range(n))
    of_all = replace(model, most_owners=1).fixed(sized.held_by(0, n))  # all replicas together have all of the state
    return largest > max(limits) or of_all > sum(limits)


def splits_that_fit(problem: Problem, tables: RangeTables, counts: Sequence[int]) -> Iterator[Candidate]:
    """Yields splits that fit, of as many micro-batches as may be: for a search that found none on ranks of its own."""
    for split in _splits(SizedProblem(problem, tables, max(counts))):
        if not split.missing_bytes(problem.cluster.memory_bytes):
            schedule = {"auto": "1f1b"}.get(problem.constraints.schedule, problem.constraints.schedule)
            yield Candidate(split.starts, split.ranks, max(counts), schedule=schedule, is_fixed=True)


def explain_infeasible(problem: Problem, tables: RangeTables, counts: Sequence[int]) -> PlanError:
    """Returns what a user needs to know: bytes missing, the stage, the largest block, what would make it fit."""
    sized = SizedProblem(problem, tables, max(counts))
    anywhere = replace(problem, constraints=replace(problem.constraints, cuts=(), cutpoints="ignore"))
    by_block = SizedProblem(problem, RangeTables(problem.graph, cut_positions(anywhere)), max(counts))
    limits = problem.cluster.memory_bytes
    split = min(_splits(sized), key=lambda split: split.missing_bytes(limits), default=None)
    if split is None:
        forced = len(next(_rank_choices(problem, tables)))
        return PlanError(
            f"no plan: the model cannot be split into {forced} stages, it has {tables.num_segments} places to cut"
        )
    rank = max(split.needed, key=lambda rank: split.needed[rank] - limits[rank])
    stages = [s for s, each in enumerate(split.ranks) if rank in each]
    blocks, ends = problem.graph.blocks, tables.positions[[*split.starts[1:], tables.num_segments]]
    names = [(blocks[tables.positions[split.starts[s]]].name, blocks[ends[s] - 1].name) for s in stages]
    places = (f"stage {s} ({first} to {last})" for s, (first, last) in zip(stages, names, strict=True))
    num_stages = f"{len(split.ranks)} stage{'s' * (len(split.ranks) > 1)}"
    return PlanError(
        f"no plan fits into memory: the best split into {num_stages} and {max(counts)} micro-batches needs "
        f"{readable(split.needed[rank])} for {' and '.join(places)}, rank {rank} has {_memory_of(problem, rank)}: "
        f"{readable(split.missing_bytes(limits))} are missing. {_largest_block(by_block)}. "
        f"To make it fit: {'; or '.join(_advice(by_block, split, rank, len(stages)))}"
    )


def _memory_of(problem: Problem, rank: int) -> str:
    """Returns what a rank has, with what of it the process takes that runs the model."""
    limit, process = problem.cluster.memory_bytes[rank], problem.cluster.process_bytes
    parts = f" ({readable(limit - process)} for the model, {readable(process)} for its process)" if process else ""
    return readable(limit) + parts


def _rank_choices(problem: Problem, tables: RangeTables) -> Iterator[Ranks]:
    """Yields ranks for the stages: the forced ones, or the ranks with most memory in a few orders."""
    constraints, cluster = problem.constraints, problem.cluster
    if constraints.stage_ranks:
        yield constraints.stage_ranks
        return
    forced = forced_stages(problem)
    replicas = max(constraints.num_replicas, 1)
    most = min(cluster.num_ranks // replicas, tables.num_segments)
    largest = sorted(range(cluster.num_ranks), key=lambda rank: -cluster.memory_bytes[rank])
    for stages in [forced] if forced else range(most, 0, -1) if most <= FEW_RANKS else [most]:
        chosen = largest[: stages * replicas]
        for order in (chosen, chosen[::-1], sorted(chosen)):
            in_turn = cycle(order)  # with more stages than ranks, each has several
            yield tuple(tuple(islice(in_turn, replicas)) for _ in range(stages))


def _splits(sized: SizedProblem) -> Iterator[_Split]:
    """Yields the best split over each choice of ranks that the model can be split over."""
    limits, tables = sized.problem.cluster.memory_bytes, sized.tables
    for ranks in _rank_choices(sized.problem, tables):
        num_held = Counter(rank for each in ranks for rank in each)
        costs = {count: _least_bytes(sized, count) for count in set(map(len, ranks))}
        process = sized.model.process_bytes  # in the bytes of each stage, and once on a rank
        shares = [
            (len(each), min((limits[rank] - process) / num_held[rank] + process for rank in each)) for each in ranks
        ]
        most = max(share for _, share in shares)  # on top of all, since costs are no less than 0
        missing = {each: costs[each[0]] - each[1] + most for each in set(shares)}
        starts = partition_chain([missing[each] for each in shares])
        if starts:
            needed = {rank: process * (1 - count) for rank, count in num_held.items()}
            for each, place in zip(ranks, pairwise([*starts, tables.num_segments]), strict=True):
                for rank in each:
                    needed[rank] += float(costs[len(each)][place])
            yield _Split(ranks, starts, needed)


def _least_bytes(sized: SizedProblem, num_replicas: int) -> Array:
    """Returns the least bytes of each range: with as few micro-batches in flight as the settings allow."""
    constraints = sized.problem.constraints
    share = -(-sized.num_micro_batches // num_replicas)
    depth = share if constraints.schedule == "gpipe" else min(constraints.in_flight or 1, share)
    return np.asarray(np.minimum.reduce([num_bytes.at(depth, share) for _, num_bytes in sized.recompute_options]))


def _bytes_of_segments(sized: SizedProblem) -> Array:
    return _least_bytes(sized, max(sized.problem.constraints.num_replicas, 1)).diagonal(1)


def _largest_block(sized: SizedProblem) -> str:
    process = sized.model.process_bytes  # which are no block's
    each, positions = _bytes_of_segments(sized) - process, sized.tables.positions
    largest = int(each.argmax())
    is_one = positions[largest + 1] - positions[largest] == 1
    return (
        f"The largest {'block is' if is_one else 'part that is never cut starts at'} "
        f"{sized.problem.graph.blocks[positions[largest]].name}: {readable(float(each[largest]))}, of which "
        f"{readable(sized.model.fixed(sized.held_by(largest, largest + 1)) - process)} are parameters, gradients and "
        "optimizer state"
    )


def _advice(sized: SizedProblem, split: _Split, rank: int, num_held: int) -> Iterator[str]:
    problem = sized.problem
    constraints, limits = problem.constraints, problem.cluster.memory_bytes
    yield _memory_to_give(problem, max(split.needed.values()))
    fits_alone = float(_bytes_of_segments(sized).max()) <= max(limits)
    if not fits_alone:
        yield "make its largest block smaller, since more ranks do not help a block that one rank must hold"
    is_forced = constraints.num_stages or constraints.cuts or constraints.stage_ranks
    if fits_alone and not is_forced:
        yield "use more ranks" + (", or drop num_replicas" if constraints.num_replicas else "")
    if fits_alone and is_forced and len(split.ranks) < len(limits):
        yield "drop num_stages, num_replicas, stage_ranks and cuts, or ask for more stages"
    if num_held > 1:
        yield f"give rank {rank} fewer of the stages (stage_ranks)"
    if constraints.recompute == "none" and problem.needs_gradient:
        yield "allow recompute"
    if constraints.in_flight > 1:
        yield "lower in_flight"
    if constraints.schedule == "gpipe":
        yield "use another schedule, since gpipe holds all its micro-batches"
    if sized.micro_batch_size > 1 and sized.num_micro_batches < problem.global_batch_size:
        yield "allow more, smaller micro-batches (num_micro_batches, max_micro_batches)"


def _memory_to_give(problem: Problem, needed_bytes: float) -> str:
    """Returns what to give to the ranks that have less than the fullest rank of a split needs: then it fits."""
    limits, margin = problem.cluster.memory_bytes, problem.cluster.memory_margin
    less = [rank for rank, limit in enumerate(limits) if limit < needed_bytes]
    whom = "each rank" if len(set(limits)) == 1 else f"rank{'s' * (len(less) > 1)} {ranks_text(less)}"
    left = f", of which {margin:.0%} are left free: memory_margin" if margin else ""
    model_bytes = needed_bytes - problem.cluster.process_bytes  # which comes on top of a limit
    amount = readable(model_bytes / (1.0 - margin) * 1.006)  # no less than that once it is rounded to three digits
    return f"give {whom} {amount} or more (memory_limit_bytes{left})"
