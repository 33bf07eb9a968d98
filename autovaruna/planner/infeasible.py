"""Says why no plan fits: what is missing, where, and what would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice, pairwise
from typing import NamedTuple

import numpy as np

from autovaruna.errors import PlanError
from autovaruna.planner.candidate import Candidate
from autovaruna.planner.cost_table import Array
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.cuts import partition_chain
from autovaruna.planner.placement import Ranks
from autovaruna.planner.problem import Problem, forced_stages
from autovaruna.planner.range_tables import RangeTables
from autovaruna.profiler.records import Cluster

_FEWEST_BY = 3
_FEW_RANKS = 16
_FEW_BLOCKS = 1000
_FEW_AMOUNTS = 8
_ROUNDED_UP = 1.006
"""Three digits of a number with this on top are no less than the number."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ranks in short: ``0-3, 6``, and ``0-96 by 32`` for those that lie apart evenly."""
    steps = {other - rank for rank, other in pairwise(ranks)}
    if len(ranks) > _FEWEST_BY and len(steps) == 1 and min(steps) > 1:
        return f"{ranks[0]}-{ranks[-1]} by {steps.pop()}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


class _Split(NamedTuple):
    """A split over some ranks whose greatest lack of memory is least, and what each of them needs."""

    ranks: Ranks
    starts: tuple[int, ...]
    needed: dict[int, float]

    def lacking(self, limits: Sequence[float]) -> dict[int, float]:
        """Returns what each rank needs that has less."""
        return {rank: num_bytes for rank, num_bytes in self.needed.items() if num_bytes > limits[rank]}

    def missing_bytes(self, limits: Sequence[float]) -> float:
        """Returns what the rank lacks that lacks most."""
        return max(0.0, *(num_bytes - limits[rank] for rank, num_bytes in self.needed.items()))


def exceeds_all(sized: SizedProblem) -> bool:
    """Says whether parameters, gradients and optimizer state alone are more than ranks have: then no plan fits."""
    model, n, limits = sized.model, sized.tables.num_segments, sized.problem.cluster.memory_bytes
    largest = max(model.fixed(sized.held_by(k, k + 1)) for k in range(n))
    of_all = replace(model, most_owners=1).fixed(sized.held_by(0, n))  # all replicas together have all of the state
    return largest > max(limits) or of_all > sum(limits)


def explain_infeasible(problem: Problem, tables: RangeTables, counts: Sequence[int]) -> PlanError:
    """Returns what a user needs to know: bytes missing, the stage, the largest block, what would make it fit."""
    sized = SizedProblem(problem, tables, max(counts))
    n = len(problem.graph.blocks)
    by_block = (
        SizedProblem(problem, RangeTables(problem.graph, range(n + 1)), max(counts)) if n <= _FEW_BLOCKS else sized
    )
    limits, found = problem.cluster.memory_bytes, list(_splits(sized))
    if not found:
        forced = len(next(_rank_choices(problem, tables)))
        return PlanError(
            f"no plan: the model cannot be split into {forced} stages, it has {tables.num_segments} places to cut"
        )
    found.sort(key=lambda split: (split.missing_bytes(limits), sum(split.lacking(limits).values())))
    split = next((each for each in found if _would_do(sized, each.lacking(limits))), found[0])
    rank = max(split.needed, key=lambda rank: split.needed[rank] - limits[rank])
    stages = [s for s, each in enumerate(split.ranks) if rank in each]
    return PlanError(
        f"no plan fits into memory: the best split into {len(split.ranks)} stages of {max(counts)} micro-batches needs "
        f"{readable(split.needed[rank])} for {_places(split, stages, sized)}, rank {rank} has "
        f"{readable(limits[rank])}: {readable(split.missing_bytes(limits))} are missing. {_largest_block(by_block)}. "
        f"To make it fit: {'; or '.join(_advice(problem, by_block, split, rank, len(stages)))}"
    )


def splits_that_fit(problem: Problem, tables: RangeTables, counts: Sequence[int]) -> Iterator[Candidate]:
    """Yields splits that fit, of as many micro-batches as may be: for a search that found none on ranks of its own."""
    for split in _splits(SizedProblem(problem, tables, max(counts))):
        if not split.lacking(problem.cluster.memory_bytes):
            yield Candidate(split.starts, split.ranks, max(counts))


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
    for stages in [forced] if forced else range(most, 0, -1) if most <= _FEW_RANKS else [most]:
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
        shares = [(len(each), min(limits[rank] / num_held[rank] for rank in each)) for each in ranks]
        most = max(share for _, share in shares)  # on top of all, since costs are no less than 0
        missing = {each: costs[each[0]] - each[1] + most for each in set(shares)}
        split = partition_chain([missing[each] for each in shares])
        if split:
            needed = dict.fromkeys(num_held, 0.0)
            for each, *place in zip(ranks, split.starts, [*split.starts[1:], tables.num_segments], strict=True):
                for rank in each:
                    needed[rank] += float(costs[len(each)][tuple(place)])
            yield _Split(ranks, split.starts, needed)


def _would_do(sized: SizedProblem, needed: Mapping[int, float]) -> bool:
    """Returns whether a split is found when ranks have what they need: which ranks are tried hangs on what they have.

    Those that are alike all get as much, and are tried as they are.
    """
    problem, cluster = sized.problem, sized.problem.cluster
    if len(set(cluster.memory_bytes)) == 1:
        return True
    limits = tuple(max(has, needed.get(rank, 0.0)) for rank, has in enumerate(cluster.memory_bytes))
    wider = replace(problem, cluster=replace(cluster, memory_bytes=limits))
    return any(True for _ in splits_that_fit(wider, sized.tables, [sized.num_micro_batches]))


def _places(split: _Split, stages: Sequence[int], sized: SizedProblem) -> str:
    ends, blocks = (*split.starts[1:], sized.tables.num_segments), sized.problem.graph.blocks
    first_and_last = ((sized.tables.positions[split.starts[s]], sized.tables.positions[ends[s]] - 1) for s in stages)
    pairs = zip(stages, first_and_last, strict=True)
    return " and ".join(f"stage {s} ({blocks[first].name} to {blocks[last].name})" for s, (first, last) in pairs)


def _least_bytes(sized: SizedProblem, num_replicas: int) -> Array:
    """Returns the least bytes of each range: with as few micro-batches in flight as the settings allow."""
    constraints = sized.problem.constraints
    share = -(-sized.num_micro_batches // num_replicas)
    depth = share if constraints.schedule == "gpipe" else min(constraints.in_flight or 1, share)
    ways = [sized.recomputed_bytes if again else sized.plain_bytes for again in sized.recompute_choices]
    return np.asarray(np.minimum.reduce([num_bytes.at(depth, share) for num_bytes in ways]))


def _bytes_of_segments(sized: SizedProblem) -> Array:
    """Returns the least bytes of a stage that holds each segment: its neighbours may save it messages."""
    least = _least_bytes(sized, max(sized.problem.constraints.num_replicas, 1))
    n = sized.tables.num_segments
    least = np.where(np.arange(n + 1)[:, None] < np.arange(n + 1), least, np.inf)
    from_any = np.minimum.accumulate(least, axis=0)
    to_any = np.minimum.accumulate(from_any[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(to_any.diagonal(1))


def _largest_block(sized: SizedProblem) -> str:
    tables, blocks = sized.tables, sized.problem.graph.blocks
    each = _bytes_of_segments(sized)
    largest = int(each.argmax())
    state = float(sized.model.fixed(sized.held)[largest, largest + 1])
    is_one = tables.positions[largest + 1] - tables.positions[largest] == 1
    return (
        f"The largest {'block is' if is_one else 'part that is never cut starts at'} "
        f"{blocks[int(tables.positions[largest])].name}: {readable(float(each[largest]))}, "
        f"of which {readable(state)} are parameters, gradients and optimizer state"
    )


def _advice(problem: Problem, sized: SizedProblem, split: _Split, rank: int, num_held: int) -> Iterator[str]:
    constraints, limits = problem.constraints, problem.cluster.memory_bytes
    yield to_give(problem.cluster, split.lacking(limits) or {rank: split.needed[rank]})
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


def to_give(cluster: Cluster, needed: Mapping[int, float]) -> str:
    """Returns what to give to ranks that lack memory, by the bytes that each needs, so that a plan fits."""
    margin = cluster.memory_margin
    whose: dict[str, list[int]] = {}
    for rank, num_bytes in sorted(needed.items(), key=lambda each: -each[1]):
        whose.setdefault(readable(num_bytes / (1.0 - margin) * _ROUNDED_UP), []).append(rank)
    if len(set(cluster.memory_bytes)) == 1 or len(whose) > _FEW_AMOUNTS:
        words = [f"each rank {next(iter(whose))}"]
    else:
        words = [f"rank{'s' * (len(ranks) > 1)} {ranks_text(sorted(ranks))} {text}" for text, ranks in whose.items()]
    left = f", of which {margin:.0%} are left free: memory_margin" if margin else ""
    return f"give {', '.join(words)} or more (memory_limit_bytes{left})"


def readable(num_bytes: float) -> str:
    """Returns bytes as a person writes them: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.{3 + (num_bytes >= 999.5)}g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
