"""Measures what `trace_events` costs of a step, on two ranks, finely enough to tell one percent.

One job, whose trace is on in every other step, in the order A B B A: a pair lies as close together as can be, and what
slows the machine for longer slows both. Noting is the median of the pairs' differences, with the interval that holds
the true median in 95 of 100 runs, whatever the distribution (order statistics). Writing happens in one step of 64; it
is clocked by itself, and spread over all steps.

python benchmarks/tracing.py [--quick]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from statistics import median
from time import perf_counter

from paired import hush, interval_of_median, start_ranks

start_ranks(2)

import torch  # noqa: E402 - after start_ranks, which says how many threads torch may start
from mpi4py import MPI  # noqa: E402
from peers import COMM, our_step  # noqa: E402
from tunable import Chain, batch_of, cuts_of, shape_for  # noqa: E402

from autovaruna import get_rank  # noqa: E402

NUM_MICRO_BATCHES = 8
LATER = 256
"""Later steps are written 64 together."""


class Toggled:
    """A step of a traced model, whose trace can be left out.

    Args:
        step: The step; `step.model` is the model.
    """

    def __init__(self, step: Callable[[], float]) -> None:
        self._step = step
        step()
        self._rank = step.model._wrapped.engine._rank  # type: ignore[attr-defined]
        self._trace = self._rank.trace
        self._trace._num_steps = LATER
        self._write = self._trace.write_step
        self._trace.write_step = self._clocked
        self._writing = 0.0

    def _clocked(self) -> None:
        begin = perf_counter()
        self._write()
        self._writing += perf_counter() - begin

    def seconds(self, is_traced: bool) -> tuple[float, float]:
        """Runs a step; returns the seconds of the slowest rank, those of writing apart."""
        self._rank.trace = self._trace if is_traced else None
        self._writing = 0.0
        COMM.Barrier()
        begin = perf_counter()
        self._step()
        spent = perf_counter() - begin - self._writing
        return COMM.allreduce(spent, MPI.MAX), COMM.allreduce(self._writing, MPI.MAX)


def measure(milliseconds: float, num_pairs: int) -> str:
    """Returns a line that says what a trace costs of a step."""
    shape = shape_for(milliseconds * 1e-3, 16384)
    settings = {"num_stages": 2, "cuts": cuts_of(2), "recompute": "none", "num_micro_batches": NUM_MICRO_BATCHES}
    with tempfile.TemporaryDirectory() as folder:
        traced = {"trace_events": True, "trace_events_file": f"{folder}/trace.json"}
        step = Toggled(our_step(Chain(shape, 2), batch_of(shape, NUM_MICRO_BATCHES), **settings, **traced))
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for place in range(num_pairs):
            for is_traced in (True, False) if place % 2 else (False, True):
                found[is_traced].append(step.seconds(is_traced))
        COMM.Barrier()
    plain = median(seconds for seconds, _ in found[False])
    differences = [(on - off) / plain for (on, _), (off, _) in zip(found[True], found[False], strict=True)]
    low, high = interval_of_median(differences)
    writing = sum(seconds for _, seconds in found[True]) / num_pairs / plain
    return (
        f"{milliseconds:g} ms a micro-batch, a step of {1e3 * plain:.2f} ms: noting {median(differences):.2%} of it "
        f"(95 % within {low:.2%} to {high:.2%}, {num_pairs} pairs), writing {writing:.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer pairs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hush()
    for milliseconds, num_pairs in ((1, 640), (10, 256)) if args.quick else ((1, 2560), (10, 640), (50, 128)):
        text = measure(milliseconds, num_pairs)
        if get_rank() == 0:
            print(text, flush=True)


if __name__ == "__main__":
    main()
