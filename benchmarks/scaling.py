"""Prints how a step grows with micro-batches, message size, arithmetic and latency, with bound and prediction beside.

Latencies are added to each message between ranks of one host. The textbook 1F1B has S - s micro-batches in flight at
stage s; varuna runs ahead while a gradient is late.

python benchmarks/scaling.py [--quick]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from statistics import median
from typing import Any

from paired import hush, start_ranks, time_pairs

start_ranks(2)
import torch  # noqa: E402 - after start_ranks, which says how many threads torch may start
from delayed import delay_messages  # noqa: E402
from ideal import ideal_step  # noqa: E402
from peers import COMM, our_step, slowest  # noqa: E402
from tunable import Chain, Shape, batch_of, cuts_of, shape_for  # noqa: E402

from autovaruna import get_rank  # noqa: E402
from autovaruna.ranks.environment import get_world  # noqa: E402


def step_of(
    shape: Shape, num_stages: int, num_micro_batches: int, **settings: Any
) -> tuple[Callable[[], float], Callable[[], None] | None]:
    """Returns our step, and where each rank has one stage the step that no pipeline can beat."""
    torch.manual_seed(0)
    chain, batch = Chain(shape, num_stages), batch_of(shape, num_micro_batches)
    bound = ideal_step(copy.deepcopy(chain), batch, num_micro_batches) if num_stages == COMM.Get_size() else None
    given = {"num_stages": num_stages, "cuts": cuts_of(num_stages), "recompute": "none", "max_micro_batches": 0}
    if num_stages > COMM.Get_size():
        given["stage_ranks"] = [[stage % COMM.Get_size()] for stage in range(num_stages)]
    step = our_step(chain, batch, num_micro_batches=num_micro_batches, **{"schedule": "1f1b", **given, **settings})
    return step, bound


def measure(
    shape: Shape, num_stages: int, num_micro_batches: int, num_times: int, **settings: Any
) -> tuple[float, ...]:
    """Returns the seconds of a step: measured, and predicted by the planner."""
    step, _ = step_of(shape, num_stages, num_micro_batches, **settings)
    seconds = [slowest(step) for _ in range(num_times + 2)][2:]
    return median(seconds), step.model.plan.predicted_seconds  # type: ignore[attr-defined]


def say(text: str) -> None:
    """Prints on rank 0."""
    if get_rank() == 0:
        print(text, flush=True)


def against_bound(milliseconds: float, kibibytes: float, num_micro_batches: int, num_times: int) -> None:
    """Prints a step of two stages beside its bound."""
    shape = shape_for(milliseconds * 1e-3, int(kibibytes * 1024))
    step, bound = step_of(shape, 2, num_micro_batches)
    assert bound is not None
    pairs = time_pairs(bound, step, num_times, 2, slowest)
    say(
        f"{milliseconds:6g} ms, {kibibytes:6g} KiB, {num_micro_batches:4d} micro-batches: "
        f"{1e3 * median(pairs.second):9.2f} ms, bound {1e3 * median(pairs.first):9.2f} ms, efficiency {pairs.spread}"
    )


def against_latency(milliseconds: float, latency: float, num_times: int) -> None:
    """Prints varuna's step beside that of 1F1B as the textbook has it, on slow links."""
    shape = shape_for(milliseconds * 1e-3, 16384)
    textbook, expected = measure(shape, 2, 16, num_times, schedule="1f1b", in_flight=2)
    ours, predicted = measure(shape, 2, 16, num_times, schedule="varuna")
    say(
        f"latency {latency:4g} ms, {milliseconds:g} ms a micro-batch: 1F1B {1e3 * textbook:.1f} ms (predicted "
        f"{1e3 * expected:.1f}), varuna {1e3 * ours:.1f} ms (predicted {1e3 * predicted:.1f}): "
        f"ratio {textbook / ours:.3f}, predicted {expected / predicted:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer settings")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hush()
    world, num_times = get_world(), 5 if args.quick else 15
    for num_micro_batches in (2, 8, 32) if args.quick else (2, 4, 8, 16, 32, 64, 128):
        against_bound(1.0, 64, num_micro_batches, num_times)
    for kibibytes in (1, 4096) if args.quick else (1, 16, 64, 256, 1024, 4096):
        against_bound(5.0, kibibytes, 8, num_times)
    for milliseconds in (0.05, 10) if args.quick else (0.05, 0.2, 1, 5, 10, 50):
        against_bound(milliseconds, 16, 8, num_times)
    for num_stages in (2, 4):
        shape = shape_for(2e-3, 16384)
        seconds, predicted = measure(copy.copy(shape), num_stages, 8, num_times)
        say(f"{num_stages} stages on 2 ranks: {1e3 * seconds:.2f} ms, predicted {1e3 * predicted:.2f} ms")
    send, receive = world.send, world.receive
    for latency in (5, 20) if args.quick else (5, 20, 40):
        world.send, world.receive = send, receive  # type: ignore[method-assign]
        delay_messages(world, latency * 1e-3)
        against_latency(10.0, latency, 3 if args.quick else 10)


if __name__ == "__main__":
    main()
