"""The global batch, cut into micro-batches."""

from __future__ import annotations

from itertools import product

from autovaruna.runtime.batch import cut_batch
from autovaruna.schedule.pipeline import even_sizes, slices


def test_micro_batches_have_the_sizes_that_the_planner_reckons_with() -> None:
    for num_groups, samples, each in product((1, 2, 3), (4, 7, 8), (1, 2, 3, 5)):
        num_micro_batches = num_groups + each - 1
        groups = tuple((rank,) for rank in range(num_groups))
        made = cut_batch((samples,) * num_groups, num_micro_batches, groups).micro_batches
        sizes = [size for _, size in slices(even_sizes(samples * num_groups, num_groups), num_micro_batches)]
        assert {m: size for m, size in enumerate(sizes) if size} == {m: part.size for m, part in made.items()}
