"""Drops cuts that another cut beats in every plan.

Rule: between two cuts lie only views, which cost nothing, keep nothing and need no parameter. Then any plan that cuts
at the one place may cut at the other instead: compute and memory stay the same and only the bytes that cross change.
So of a run of cuts that are parted by views alone, those go that another one of the run beats, in the part of its
bytes that is fixed and in the part that grows with the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from autovaruna.graph.records import Size, Value


def crossing_sizes(values: Sequence[Value], num_blocks: int) -> list[Size]:
    """Returns the bytes that cross the cut after each block (the last one: nothing does)."""
    fixed, sample = [0.0] * (num_blocks + 1), [0.0] * (num_blocks + 1)
    for value in values:
        if value.consumers:
            last = max(value.consumers)
            for totals, num_bytes in ((fixed, value.size.fixed_bytes), (sample, value.size.sample_bytes)):
                totals[value.producer] += num_bytes
                totals[last] -= num_bytes
    running = Size(0.0, 0.0)
    sizes = []
    for index in range(num_blocks):
        running = Size(running.fixed_bytes + fixed[index], running.sample_bytes + sample[index])
        sizes.append(running)
    return sizes


def merge_free_blocks(
    blocks: Sequence[tuple[str, ...]],
    crossing: Sequence[Size],
    is_free: Callable[[int], bool],
    marked: Collection[int] = (),
) -> tuple[tuple[str, ...], ...]:
    """Joins blocks so that only cuts are left that no other cut beats.

    Args:
        blocks: Node names of each block, in order.
        crossing: Bytes that cross the cut after each block.
        is_free: Whether the block of an index holds views alone.
        marked: Cuts that stay in any case, because a cut point of the user's means them.
    """
    kept: list[int] = []
    run: list[int] = []
    for cut in range(len(blocks) - 1):
        if run and not is_free(cut):
            kept += _unbeaten(run, crossing)
            run = []
        run.append(cut)
    kept += _unbeaten(run, crossing)
    if len(blocks) > 1 and is_free(len(blocks) - 1):
        kept = [cut for cut in kept if cut not in run]
    if kept and is_free(0):
        first_run = [cut for cut in range(len(blocks) - 1) if all(is_free(block) for block in range(cut + 1))]
        kept = [cut for cut in kept if cut not in first_run]
    kept = sorted({*kept, *marked})
    starts = [0, *(cut + 1 for cut in kept)]
    ends = [*(cut + 1 for cut in kept), len(blocks)]
    return tuple(
        tuple(name for block in blocks[start:end] for name in block) for start, end in zip(starts, ends, strict=True)
    )


def _unbeaten(run: Sequence[int], crossing: Sequence[Size]) -> list[int]:
    return [cut for cut in run if not any(_beats(other, cut, crossing) for other in run)]


def _beats(one: int, other: int, crossing: Sequence[Size]) -> bool:
    """Whether cut `one` is never worse than `other`; of equals the earlier one wins."""
    mine, its = crossing[one], crossing[other]
    never_worse = mine.fixed_bytes <= its.fixed_bytes and mine.sample_bytes <= its.sample_bytes
    is_equal = mine == its
    return one != other and never_worse and (not is_equal or one < other)
