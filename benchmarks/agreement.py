"""Measures what ranks tell each other in a step with clipping and a scaler, beside a bare Allreduce of 64 bytes.

Processor time, for a machine of few cores has more ranks than cores, and how often a rank leaves its core; by mpirun
also that of a call whose record MPI has joined at once, followed by a yield, the least that ranks which share cores
take. And, of thousands of ranks in one process, the messages and bytes of each, by counting.

python benchmarks/agreement.py [--launchers mpirun torchrun] [--ranks 2 4 8] [--count 128 1024 4096]
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any, NoReturn

from autovaruna.ranks.environment import get_world
from autovaruna.ranks.exchange import Parts, RankExchange, digest, keep_part
from autovaruna.ranks.transport.base import DONE
from autovaruna.ranks.transport.threads import Mailboxes, ThreadTransport
from autovaruna.ranks.world import World
from autovaruna.session.shared_call import BatchNumbers

NUM_PARAMETERS = 1200
"""Norms that clipping tells, of all ranks together: the parameters of GPT-3."""
NUM_WARM_UP = 20

Message = tuple[bytes, int, bytes | None]
"""What must be alike, flags, and a block."""


def call(rank: int, num_ranks: int) -> Message:
    """Returns what a call of the model tells where all have as many samples, and their numbers are known."""
    return b"k" * 250, 0, BatchNumbers(8, (), []).to_bytes()


def differing_call(rank: int, num_ranks: int) -> Message:
    """Returns the same with a number of tokens and a mean, which differ."""
    return b"k" * 250, 0, BatchNumbers(8, (), [1000 + rank, 0.5 + rank]).to_bytes()


def clipping(rank: int, num_ranks: int) -> Message:
    share = range(rank, NUM_PARAMETERS, num_ranks)
    return b"n" * 20 * NUM_PARAMETERS, 0, array("d", map(float, share)).tobytes()


def unscaling(rank: int, num_ranks: int) -> Message:
    return b"", 2 * (rank == 1), None


AGREEMENTS = {"call": call, "call, numbers differ": differing_call, "clipping": clipping, "unscaling": unscaling}


def used(act: Callable[[], object], num_times: int) -> tuple[float, float]:
    """Returns the microseconds of processor time of a call on this rank, and how often it leaves its core."""
    for _ in range(NUM_WARM_UP):
        act()
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.process_time()
    for _ in range(num_times):
        act()
    seconds = time.process_time() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
    return 1e6 * seconds / num_times, switches / num_times


def measure(num_times: int) -> None:
    """Prints a line for each agreement on the ranks of a launcher."""
    world = get_world()
    rank, num_ranks = world.rank, world.num_ranks
    acts: dict[str, Callable[[], object]] = {}
    for name, make in AGREEMENTS.items():
        alike, flags, block = make(rank, num_ranks)
        acts[name] = lambda name=name, a=alike, f=flags, b=block: world.exchange(name, None, a, f, b)
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        from mpi4py import MPI

        memory = bytearray(64)
        acts["MPI_Allreduce of 64 bytes"] = lambda: MPI.COMM_WORLD.Allreduce(
            MPI.IN_PLACE, [memory, MPI.UINT64_T], MPI.BOR
        )
        acts["call, joined at once"] = joined_at_once(world, acts["call"])
    for name, act in acts.items():
        rows = world.gather_numbers(used(act, num_times), "times")
        if rank == 0:
            (own, switches), total = rows[0], sum(row[0] for row in rows)
            others = (total - own) / (num_ranks - 1)
            shown = f"rank 0 {own:4.0f} us {switches:4.1f} switches  others {others:4.0f} us  all {total / 1e3:5.2f} ms"
            print(f"{num_ranks:3} ranks  {name:26} {shown}", flush=True)


def joined_at_once(world: World, act: Callable[[], object]) -> Callable[[], None]:
    """Returns an agreement in which no rank waits for another, which leaves its core once."""

    def call_and_yield() -> None:
        transport: Any = world.transport
        start, transport.start_or = transport.start_or, lambda record: DONE
        act()
        transport.start_or = start
        os.sched_yield()

    return call_and_yield


class CountedRank(ThreadTransport):
    """A rank of many in one process, whose messages are counted."""

    def __init__(self, rank: int, mailboxes: Mailboxes) -> None:
        super().__init__(rank, mailboxes)
        self.num_messages = self.num_bytes = 0
        self.parts: Parts = {}

    def send_notice(self, data: bytes, destination: int) -> None:
        self.num_messages += 1
        self.num_bytes += len(data)
        super().send_notice(data, destination)

    def abort(self, error: BaseException, where: str) -> NoReturn:
        raise error

    def listen(self) -> None:
        for _, data in self.poll_notices():
            keep_part(data, self.parts)


def count(num_ranks: int) -> None:
    """Prints the most messages and bytes that a rank sends in a step, and what the slowest computes."""
    mailboxes = Mailboxes(num_ranks)
    ranks = [CountedRank(rank, mailboxes) for rank in range(num_ranks)]
    step = [0, 0]
    for number, (name, make) in enumerate(AGREEMENTS.items()):
        messages = [make(each.rank, num_ranks) for each in ranks]
        began = time.process_time()
        going = {}
        for each, (alike, flags, block) in zip(ranks, messages, strict=True):
            each.num_messages = each.num_bytes = 0
            going[each] = RankExchange(each, each.parts, number, (1, digest(alike)), flags, block)
        waiting = dict(going)
        while waiting:
            for each in list(waiting):
                each.listen()
                if waiting[each].is_done():
                    del waiting[each]
        seconds = (time.process_time() - began) / num_ranks
        most = [max(each.num_messages for each in ranks), max(each.num_bytes for each in ranks)]
        if name != "call":  # a step has one of the two, and this is the smaller
            step = [a + b for a, b in zip(step, most, strict=True)]
        print(
            f"{num_ranks:5} ranks  {name:26} {most[0]:3} messages {most[1]:7} bytes a rank  {1e6 * seconds:6.0f} us",
            flush=True,
        )
    limit = 4 * math.ceil(math.log2(num_ranks))
    print(
        f"{num_ranks:5} ranks  a step: {step[0]} messages (4 log2: {limit}), {step[1] / 1024:.1f} KiB a rank",
        flush=True,
    )


def start(launcher: str, num_ranks: int, num_times: int) -> None:
    own = [__file__, "--on-ranks", str(num_times)]
    if launcher == "mpirun":
        command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(num_ranks), sys.executable, *own]
    else:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(num_ranks),
            *own,
        ]
    print(launcher, flush=True)
    environment = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    subprocess.run(command, env={**os.environ, **environment}, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="*", default=["mpirun", "torchrun"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4, 8, 16, 32])
    parser.add_argument("--count", nargs="*", type=int, default=[128, 1024, 4096])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--on-ranks", type=int, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.on_ranks:
        measure(options.on_ranks)
        return
    for launcher in options.launchers:
        for num_ranks in options.ranks:
            if launcher == "mpirun" or num_ranks <= 16:
                start(launcher, num_ranks, options.times)
    for num_ranks in options.count:
        count(num_ranks)


if __name__ == "__main__":
    main()
