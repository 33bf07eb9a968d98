"""The global batch, cut into micro-batches."""

from __future__ import annotations

from itertools import product

import pytest

from autovaruna.runtime.batch import cut_batch
from autovaruna.schedule.pipeline import even_sizes, slices


@pytest.mark.parametrize("groups", [((0,), (1,), (2,)), ((0, 1, 2),), ((0, 2), (1,))])
@pytest.mark.parametrize("other", [0, 5, 8])
@pytest.mark.parametrize("num_micro_batches", [3, 4, 7])
def test_what_ranks_own_is_what_they_passed(
    groups: tuple[tuple[int, ...], ...], other: int, num_micro_batches: int
) -> None:
    sizes = (5, 5, 5) if len(groups) == 1 else (5, other, 5)
    batch = cut_batch(sizes, num_micro_batches, groups)
    for rank, size in enumerate(sizes):
        mine = batch.owned_by(rank)
        assert sum(part.size for part in mine) == batch.num_samples_of(rank) == size
        assert [part.start for part in mine] == [sum(part.size for part in mine[:i]) for i in range(len(mine))]
    assert batch.num_samples == sum(sizes[ranks[0]] for ranks in groups)


def test_micro_batches_have_the_sizes_that_the_planner_reckons_with() -> None:
    for num_groups, samples, each in product((1, 2, 3), (4, 7, 8), (1, 2, 3, 5)):
        num_micro_batches = num_groups + each - 1
        groups = tuple((rank,) for rank in range(num_groups))
        made = cut_batch((samples,) * num_groups, num_micro_batches, groups).micro_batches
        sizes = [size for _, size in slices(even_sizes(samples * num_groups, num_groups), num_micro_batches)]
        assert {m: size for m, size in enumerate(sizes) if size} == {m: part.size for m, part in made.items()}
