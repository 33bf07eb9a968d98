"""Split backwards under mpirun: the bits of whole ones."""

from __future__ import annotations

from tests.mpi.launch import run_on_ranks
from tests.reference import bit_equal
from tests.session.training import merge

NAMES = ["dropout", "tied_three_ways"]


def test_both_ways_give_the_same_bits() -> None:
    rows = run_on_ranks(2, "tests.mpi.zero_bubble:both_ways", NAMES)
    for name in NAMES:
        split, plain = (merge([row[f"{name}/{way}"] for row in rows]) for way in ("zero_bubble", "1f1b"))
        bit_equal(split, plain)
