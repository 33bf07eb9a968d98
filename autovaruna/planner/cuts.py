"""Finds the blocks that names of cuts mean: ``module.path/node``, or a module path alone, its first block."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from autovaruna.errors import PlanError
from autovaruna.graph.records import Graph


def resolve_cut(graph: Graph, name: str) -> int:
    """Returns the index of the block at which a cut starts a new stage; the name may be that of a cut point.

    Raises:
        PlanError: if no block and no module has that name; names the nearest.
    """
    for block in graph.blocks:
        if block.name == name:
            return block.index
    for mark in graph.cut_marks:
        if mark.name == name and mark.block > 0:
            return mark.block
    for block in graph.blocks:
        if block.module == name or block.module.startswith(name + "."):
            return block.index
    modules = {part for block in graph.blocks for part in _prefixes(block.module)}
    names = [block.name for block in graph.blocks]
    nearest = get_close_matches(name, [*sorted(modules), *names], n=3, cutoff=0.4)
    hint = f"; the nearest are {', '.join(nearest)}" if nearest else f"; the blocks start with {', '.join(names[:5])}"
    raise PlanError(f"cut {name!r} names no block and no module of this model{hint}")


def resolve_cuts(graph: Graph, names: Sequence[str]) -> tuple[int, ...]:
    """Returns the first block of each stage but the first.

    Raises:
        PlanError: if a name is unknown, or the cuts are not in execution order, or one leaves a stage empty.
    """
    starts = tuple(resolve_cut(graph, name) for name in names)
    before, before_name = 0, "the start of the model"
    for start, name in zip(starts, names, strict=True):
        if start <= before:
            raise PlanError(
                f"cut {name!r} (block {start}) does not lie after {before_name!r} (block {before}): the stage between "
                f"them would be empty; give the cuts in execution order"
            )
        before, before_name = start, name
    return starts


def stage_blocks(starts: Sequence[int], num_blocks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the blocks of each stage, given the first block of each (the first one is 0)."""
    ends = [*starts[1:], num_blocks]
    return tuple(tuple(range(i, j)) for i, j in zip(starts, ends, strict=True))


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: k + 1]) for k in range(len(parts)) if parts[0]]
