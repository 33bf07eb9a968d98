"""Follows the values of a graph from block to block: what waits for what, what crosses a cut, the longest path."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from autovaruna.graph.records import Value
from autovaruna.planner.cost_table import Array


class Flow:
    """Where some values of a graph go; what that says of their blocks is found once, and asked for every M."""

    def __init__(self, values: Sequence[Value], num_blocks: int) -> None:
        self.values, self.num_blocks = values, num_blocks

    @cached_property
    def holders(self) -> dict[int, list[int]]:
        """By block, the earlier ones that were the last to make or use a value which it needs, ascending."""
        found: dict[int, set[int]] = {}
        for value in self.values:
            for holder, user in pairwise(sorted({value.producer, *value.consumers})):
                found.setdefault(user, set()).add(holder)
        return {user: sorted(holders) for user, holders in found.items()}

    @cached_property
    def producers(self) -> dict[int, list[int]]:
        """The blocks whose values each block uses, by block; those that use none are left out."""
        found: dict[int, list[int]] = {}
        for value in self.values:
            for user in value.consumers:
                found.setdefault(user, []).append(value.producer)
        return dict(sorted(found.items()))

    def fill_seconds(self, block_seconds: Array) -> Array:
        """Returns, for each block p, the least seconds of other stages that a stage starting at p waits for.

        Args:
            block_seconds: of each block, forward (of gradients: backward; then the wait is that after the stage's last
                backward), on the fastest rank.

        Returns:
            ``(num_blocks,)``, valid for every split into consecutive stages, one stage a rank.
        """
        work = [0.0, *np.cumsum(block_seconds).tolist()]
        fill = [0.0] * self.num_blocks
        # The stage that holds block h starts at some i <= h, has waited fill[i], and works at least work[h + 1] -
        # work[i].
        slack = [0.0] * self.num_blocks
        for p in range(1, self.num_blocks):
            holder = max(self.holders.get(p, [-1]))
            fill[p] = work[holder + 1] + slack[holder] if holder >= 0 else 0.0
            slack[p] = min(slack[p - 1], fill[p] - work[p])
        return np.array(fill)

    def neighbour_bytes(self, micro_batch_size: float) -> Array:
        """Returns, for each block p, the bytes of values that block p - 1 has and p uses, which cross a cut there."""
        users, fixed, each = self._neighbours
        return np.asarray(np.bincount(users, fixed + each * micro_batch_size, self.num_blocks + 1), dtype=np.float64)

    @cached_property
    def _neighbours(self) -> tuple[Array, Array, Array]:
        """Uses of values that the block before has: the block, and the bytes, fixed ones and for each sample."""
        found = [
            (user, value.size.fixed_bytes, value.size.sample_bytes)
            for value in self.values
            for holders in [{value.producer, *value.consumers}]
            for user in value.consumers
            if user - 1 in holders
        ]
        users, fixed, each = np.array(found, dtype=np.float64).reshape(-1, 3).T
        return users.astype(np.int64), fixed, each

    def longest_path(self, block_seconds: Array) -> list[int]:
        """Returns the blocks of the path along the values, each block before the next, that takes longest."""
        seconds, origin = block_seconds.tolist(), [-1] * self.num_blocks
        for block, producers in self.producers.items():
            origin[block] = max(producers, key=seconds.__getitem__)
            seconds[block] += seconds[origin[block]]
        path = [max(range(len(seconds)), key=seconds.__getitem__)]
        while origin[path[-1]] >= 0:
            path.append(origin[path[-1]])
        return path[::-1]
