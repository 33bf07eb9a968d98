"""Reads and writes Varuna's ``stage_to_rank_map``: which ranks hold each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autovaruna.errors import InputError

AUTO = "auto"
"""What the launcher passes on in place of a map that is still to be found."""

Grid = tuple[tuple[int, ...], ...]
"""The ranks of each stage."""
StageMap = Mapping[int, Sequence[int]] | Sequence[Sequence[int]] | str | None


def grid_of(num_stages: int, num_replicas: int) -> Grid:
    """Returns the map that Varuna's launcher makes: the stages of a replica are on neighbouring ranks."""
    num_ranks = num_stages * num_replicas
    return tuple(tuple(range(stage, num_ranks, num_stages)) for stage in range(num_stages))


def map_text(grid: Grid) -> str:
    """Returns a map as text: ``0,2;1,3`` for two stages of two replicas."""
    return ";".join(",".join(map(str, ranks)) for ranks in grid)


def read_map(stage_to_rank_map: StageMap, num_ranks: int) -> Grid | None:
    """Returns the ranks of each stage; None: the map is to be found.

    Args:
        stage_to_rank_map: ``{stage: ranks}``, a list of lists, ``"0,2;1,3"`` or ``"0,2;1,3;"``, None or ``"auto"``.
        num_ranks: ranks that there are.

    Raises:
        InputError: it is no map, or does not give every rank its place.
    """
    if stage_to_rank_map is None or stage_to_rank_map in ("", AUTO):
        return None
    try:
        grid = _ranks_of_stages(stage_to_rank_map)
    except (TypeError, ValueError, KeyError):
        raise InputError(
            f"stage_to_rank_map is {stage_to_rank_map!r}: expected the ranks of each stage, as "
            "{0: [0, 2], 1: [1, 3]} or '0,2;1,3'; None lets it be found."
        ) from None
    complaint = _complaint(grid, num_ranks)
    if complaint:
        raise InputError(f"stage_to_rank_map is {map_text(grid)!r} for {num_ranks} ranks: {complaint}.")
    return grid


def _ranks_of_stages(given: StageMap) -> Grid:
    if isinstance(given, str):
        stages = given.rstrip("; ").split(";")
        return tuple(tuple(int(rank) for rank in stage.split(",")) for stage in stages)
    if isinstance(given, Mapping):
        numbered = {int(stage): ranks for stage, ranks in given.items()}
        given = [numbered[stage] for stage in range(len(numbered))]
    assert given is not None
    return tuple(tuple(int(rank) for rank in ranks) for ranks in given)


def _complaint(grid: Grid, num_ranks: int) -> str:
    named = [rank for ranks in grid for rank in ranks]
    if not named or not all(grid):
        return "got a stage without ranks; expected at least one for each"
    unknown = sorted({rank for rank in named if not 0 <= rank < num_ranks})
    if unknown:
        return f"got rank {unknown[0]}; expected ranks from 0 to {num_ranks - 1}. Start more, or name these"
    if len(set(named)) < len(named):
        return "got a rank twice; expected each in one place"
    missing = sorted(set(range(num_ranks)) - set(named))
    return f"rank {missing[0]} is in no stage; name it, or start {len(named)} ranks" if missing else ""
