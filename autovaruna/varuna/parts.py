"""Says which measurements belong to which part of a model between its cut points."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autovaruna.errors import InputError
from autovaruna.graph.traced import TracedModel
from autovaruna.planner.marks import marked_blocks
from autovaruna.profiler.measure import Key
from autovaruna.profiler.parts import Part, block_parts, layer_parts, repeated_part


def parts_of(traced: TracedModel) -> list[Part]:
    """Returns everything that is measured of a model."""
    return [part for part in (*block_parts(traced), *layer_parts(traced), repeated_part(traced)) if part.nodes]


def keys_of(traced: TracedModel, sizes: Sequence[int]) -> list[Key]:
    """Returns the measurements of a whole model."""
    return [(part.signature, size) for size in sizes for part in parts_of(traced)]


def keys_between(traced: TracedModel, sizes: Sequence[int], wanted: Collection[int]) -> set[Key]:
    """Returns the measurements of the parts with some numbers; part p lies between the cut points p - 1 and p.

    Raises:
        InputError: there is no such part.
    """
    starts = [0, *marked_blocks(traced.graph), len(traced.graph.blocks)]
    unknown = sorted(place for place in wanted if not 0 <= place < len(starts) - 1)
    if unknown:
        raise InputError(f"pstages_to_profile names {unknown[0]}; expected parts from 0 to {len(starts) - 2}.")
    blocks = {block for place in wanted for block in range(starts[place], starts[place + 1])}
    chosen = [part for part in parts_of(traced) if not part.blocks or any(b.index in blocks for b in part.blocks)]
    return {(part.signature, size) for size in sizes for part in chosen}
