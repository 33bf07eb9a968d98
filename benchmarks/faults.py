"""Strikes jobs on emulated hosts with faults at random moments, and prints what each costs and whether all went well.

A job trains a model with dropout, AdamW and a scheduler on 3 hosts of a rank each, or more, one stage a rank, under
`autovaruna run`. Its losses and weights shall be those of one process to the last bit, whatever happens to it. A fault
strikes a step, or, one time in four, the recovery from the fault before it. Root only.

python benchmarks/faults.py [--faults N] [--seed S] [--faults-per-job K] [--only KIND ...] [--hosts H] [--patience P]
    [--processor SECONDS]    # what share of a core the manager takes, too, where it writes no checkpoints
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.hosts.elastic_run import SCRIPT, ElasticRun, leftovers
from tests.hosts.emulation import Hosts, reason_to_skip

MEMORY = ("checkpoint", "keepers", "cut", "full")
"""A rank dies while a checkpoint is written, or on a host where memory is full; all keepers stop for a while; two hosts
are cut off for a while."""
ALONE = ("half there", "deaths", "slow", "manager")
"""Those that take several events, and strike no recovery: mpirun is killed while a host's sshd is stopped; a rank dies
twice at one step; a host is lost while both others are left out as slow; the manager is killed and started again."""
OF_HOSTS = ("host", "power", "half", "notice")
"""A host is killed, or loses its power; every second one is killed; one is given notice of."""
KINDS = ("rank", "rank 0", "mpirun", "stub", "keeper", "standby", "stop", *OF_HOSTS, *MEMORY, *ALONE)
ENDING = ("rank", "rank 0", "mpirun", "stub", "stop", *OF_HOSTS, *MEMORY, *ALONE[:-1])
"""Those that always end a run of the job."""
WIDTH = 1024  # of the model's layers: of steps that take less than 5 ms, no rank is called slow
STEP_SECONDS = 0.05
NUM_STEPS = 100_000
NOTICED_SECONDS = CLEAN_SECONDS = 10.0
STOPPED_SECONDS, CUT_SECONDS = 6.0, 15.0
LONGEST_SECONDS = 30.0
SLOW_SECONDS = 90.0
MOST_LOST = 40
FILLING = "/dev/shm/filling"
BLAMED = re.compile(r"rank (\d+)(?: on (\S+?))? (?:was ended|ended|is gone|is stopped)")


@dataclass
class Fault:
    """What struck a job, and what came of it.

    Attributes:
        kind: one of `KINDS`.
        at: when, on the monotonic clock, seconds, and since the epoch.
        rank, host: what was struck; -1 and empty: none.
        in_recovery: whether the job had not come to a step since the fault before.
        seconds: until the next step that is newer than all before was done.
        lost: steps that were done again.
    """

    kind: str
    at: float
    time: float
    rank: int = -1
    host: str = ""
    in_recovery: bool = False
    seconds: float = 0.0
    noticed: float = 0.0
    lost: int = 0
    phases: dict[str, float] = field(default_factory=dict)


class Striker:
    """Strikes one job.

    Args:
        run: The job.
        draw: What is random.
        kinds: The faults to draw from.
        faults: Gets those that the job has survived.
        patience: How many times as long as on a machine without other work all may take.
    """

    def __init__(
        self, run: ElasticRun, draw: random.Random, kinds: list[str], faults: list[Fault], patience: float
    ) -> None:
        self.run, self.draw, self.kinds, self.faults, self.patience = run, draw, kinds, faults, patience
        self.violations: list[str] = []
        self.missing: set[str] = set()

    def strike(self, kind: str, in_recovery: bool) -> Fault | None:
        """Strikes; returns None if there was nothing to strike."""
        run, hosts = self.run, self.run.hosts
        in_job = next((event["hosts"] for event in reversed(run.events) if event["event"] == "start"), [])
        others = [host for host in in_job if host != "h1" and hosts.is_up(host) and host not in self.missing]
        if kind in ALONE and (in_recovery or (kind == "slow" and (self.missing or len(hosts.names) > 3))):
            return None
        is_of_host = kind in ("host", "power", "notice", "half there")
        if is_of_host and len(others) < 1 + in_recovery:
            return None  # the first host has the manager, and its copy may be on the other one
        host = self.draw.choice(others if is_of_host else ["h1", *others])
        fault = Fault(kind, time.monotonic(), time.time(), in_recovery=in_recovery)
        if kind in MEMORY:
            if in_recovery or not self._strike_memory(fault, others):
                return None
        elif kind in ("rank", "rank 0", "stop"):
            ranks = run.ranks()
            chosen = [rank for rank in ranks if (rank == 0) == (kind == "rank 0")] or list(ranks)
            if not chosen:
                return None
            fault.rank = self.draw.choice(chosen)
            fault.host, process = ranks[fault.rank]
            run.strike(process, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        elif kind == "half":
            if in_recovery or self.missing:
                return None
            self.missing.update(hosts.names[1::2])
            for host in hosts.names[1::2]:
                hosts.kill(host)
        elif is_of_host:
            fault.host = host
            self.missing.add(host)
            if kind == "notice":
                told = hosts.run(
                    "h1", [sys.executable, "-m", "autovaruna", "notify", host, "--seconds", "30"], check=False
                )
                if told.returncode:
                    self.violations.append(f"notify: {told.stderr}")
                fault.at, fault.time = time.monotonic(), time.time()
            elif kind == "half there":
                hosts.stop_sshd(host)
                run.strike(run.process("h1", "prterun --hostfile"))
            else:
                hosts.kill(host, power_loss=kind == "power")
        elif kind == "deaths":
            last = run.steps[-1][1]
            (hosts.shared / "die").write_text(f"{last + 20}\n{last + 20}\n")
            run.wait(lambda: not (hosts.shared / "die").read_text().strip(), "two deaths at one step")
        elif kind == "slow":
            self._slow_down()
            fault.host, fault.at, fault.time = "h3", time.monotonic(), time.time()
            self.missing.add("h3")
            hosts.kill("h3")
        elif kind == "manager":
            run.command.send_signal(signal.SIGKILL)
            run.command.wait(CLEAN_SECONDS)
            run.start()
        else:
            words = {"mpirun": "prterun --hostfile", "stub": "stub.py", "keeper": "elastic.keeper"}
            fault.host = "h1" if kind == "mpirun" else host
            process = run.process(fault.host, words.get(kind, "elastic.standby"))
            if not process:
                return None
            run.strike(process)
        return fault

    def _slow_down(self) -> None:
        """Stops the ranks of two hosts for most of the time until both are left out."""
        run, slow = self.run, {"h1", "h2"}
        since, deadline = len(run.events), time.monotonic() + SLOW_SECONDS
        while slow and time.monotonic() < deadline:
            struck = [process for host, process in run.ranks().values() if host in slow]
            for _ in range(20):
                for number, seconds in ((signal.SIGSTOP, 0.02), (signal.SIGCONT, 0.01)):
                    for process in struck:
                        run.strike(process, number)
                    time.sleep(seconds)
            ends = " ".join(event["text"] for event in run.events[since:] if event["event"] == "ended")
            slow -= {host for host in slow if re.search(rf"host [^:]*\b{host}\b[^:]* is slow", ends)}
        if slow:
            self.violations.append(f"not left out, though slow: {slow}\n{run.text}")

    def _strike_memory(self, fault: Fault, others: list[str]) -> bool:
        """Strikes what holds the state; returns False if there is nothing to strike."""
        run, hosts = self.run, self.run.hosts
        if fault.kind == "keepers":
            keepers = [run.process(host, "elastic.keeper") for host in ["h1", *others]]
            for number, seconds in ((signal.SIGSTOP, STOPPED_SECONDS), (signal.SIGCONT, 0.0)):
                for process in keepers:
                    run.strike(process, number)
                time.sleep(seconds)
            return True
        if fault.kind == "cut":
            for host in others:
                hosts.cut(host)
            time.sleep(CUT_SECONDS)
            for host in others:
                hosts.mend(host)
            return bool(others)
        if fault.kind == "full" and others:
            fault.host = self.draw.choice(others)
            self.missing.add(fault.host)
            with open(hosts.path(fault.host, FILLING), "wb") as file:
                room = os.statvfs(file.fileno())
                os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
        elif fault.kind == "checkpoint":
            run.wait(lambda: any((hosts.shared / "checkpoints").glob(".step-*")), "a checkpoint", 60.0)
        ranks = run.ranks()
        fault.at, fault.time = time.monotonic(), time.time()
        fault.rank = 0
        run.strike(ranks[0][1])
        return fault.kind == "checkpoint" or bool(others)

    def watch(self, fault: Fault, newest: int) -> None:
        """Waits until the job has come further than before a fault, and notes what that took."""
        run = self.run
        must_end = fault.kind in ENDING and not fault.in_recovery
        clock = time.time() - time.monotonic()

        def after() -> list[dict[str, Any]]:
            return [event for event in run.events if event["time"] >= fault.time - 0.02]

        def found() -> list[tuple[float, int]]:
            """Returns the new steps of the last run, empty while the fault has not shown its effect."""
            events = after()
            if must_end and not any(event["event"] == "ended" for event in events):
                return []
            starts = [event["time"] - clock for event in run.events if event["event"] == "start"]
            begin = max(fault.at, starts[-1])
            ends = [event["time"] - clock for event in events if event["event"] == "ended"]
            if ends and ends[-1] > starts[-1]:
                return []
            steps = [(when, step) for when, step, _ in run.steps if when > begin and step > newest]
            return steps if len(steps) > 3 else []

        run.wait(lambda: bool(found()), f"a step after {fault}", 120.0 * self.patience)
        events = after()
        fault.seconds = found()[0][0] - fault.at
        begin = max(fault.at, *(event["time"] - clock for event in run.events if event["event"] == "start"))
        newest = max(step for when, step, _ in run.steps if when <= begin)
        fault.lost = sum(when > begin and step <= newest for when, step, _ in run.steps)
        ended = next((event for event in events if event["event"] == "ended"), None)
        if ended is not None:
            fault.noticed = ended["time"] - fault.time
            start = [event["time"] for event in events if event["event"] == "start"][-1]
            fault.phases = {"noticed": fault.noticed, "restarted": start - ended["time"]}
            fault.phases["first step"] = fault.seconds - (start - fault.time)
        self.faults.append(fault)
        self._judge(fault, ended)

    def _judge(self, fault: Fault, ended: dict[str, object] | None) -> None:
        words = "" if ended is None else str(ended["text"])
        complain = lambda text: self.violations.append(f"{fault}: {text}: {words}\n{self.run.text}")  # noqa: E731
        if fault.lost > MOST_LOST:
            complain(f"{fault.lost} steps were lost")
        longest = 2 * LONGEST_SECONDS if fault.kind in ALONE else LONGEST_SECONDS
        if fault.seconds > self.patience * longest + CUT_SECONDS * (fault.kind == "cut"):
            complain(f"{fault.seconds:.1f} s to the next step")
        if ended is not None and fault.noticed > self.patience * NOTICED_SECONDS and fault.kind != "notice":
            complain(f"noticed after {fault.noticed:.1f} s")
        if fault.in_recovery or fault.kind in (*MEMORY, "deaths"):
            return
        if fault.kind == "half there" and not any(
            event["event"] == "left_out" and event["host"] == fault.host for event in self.run.events
        ):
            complain("the host was not left out")
        if fault.kind == "keeper" and ended is not None:
            complain("the run ended")
        found = BLAMED.search(words)
        if found is not None and fault.kind in ("rank", "rank 0", "stop") and int(found[1]) != fault.rank:
            complain("another rank was blamed")
        if found is not None and fault.kind in ("mpirun", "keeper", *OF_HOSTS):
            complain("a rank was blamed")
        if fault.kind in ("rank", "rank 0", "stop") and found is None:
            complain("no rank was blamed")
        if fault.kind in ("host", "power", "slow") and (ended is None or ended["lost"] != [fault.host]):
            complain("the lost host was not named")
        if fault.kind not in ("host", "power", "half", "slow") and ended is not None and ended["lost"]:
            complain("a host was blamed")

    def bring_back(self) -> None:
        """Boots hosts that are missing, and lets the job take them."""
        run = self.run
        if not self.missing:
            return
        since = len(run.events)
        for host in sorted(self.missing):
            if not run.hosts.is_up(host):
                run.hosts.boot(host)
            run.hosts.continue_sshd(host)
            run.hosts.path(host, FILLING).unlink(missing_ok=True)
        run.list_hosts(run.hosts.names)
        self.missing.clear()

        def is_whole() -> bool:
            events = run.events
            starts = [k for k, event in enumerate(events) if event["event"] == "start"]
            last = events[starts[-1] :]
            return len(last[0]["hosts"]) == len(run.hosts.names) and any(each["event"] == "running" for each in last)

        run.wait(is_whole, f"all hosts, after event {since}", 120.0 * self.patience)

    def strike_all(self, count: int) -> None:
        """Strikes so many times, and lets the job recover after each, or most of them."""
        for _ in range(count):
            self.run.wait_for_steps(self.draw.randrange(8, 40), 120.0 * self.patience)
            newest = self.run.steps[-1][1]
            kind = self.draw.choice(self.kinds)
            fault = self.strike(kind, False)
            if fault is None:
                continue
            struck = [fault]
            while self.draw.random() < 0.25:
                time.sleep(self.draw.uniform(0.0, 4.0))
                in_recovery = self.run.steps[-1][1] <= newest or self.run.steps[-1][0] < struck[-1].at
                again = self.strike(self.draw.choice(self.kinds), True) if in_recovery else None
                if again is not None:
                    fault.in_recovery = True
                    struck.append(again)
            newest = max(newest, *(step for when, step, _ in self.run.steps if when <= struck[-1].at))
            for each in struck:
                self.watch(each, newest)
                phases = ", ".join(f"{name} {spent:.2f}" for name, spent in each.phases.items())
                where = "in recovery, " if each.in_recovery else ""
                print(
                    f"{each.kind:8} {each.host:3} {each.seconds:6.2f} s, {where}{each.lost} lost, {phases}", flush=True
                )
            if self.missing and self.draw.random() < 0.7:
                self.bring_back()


def print_processor(run: ElasticRun, seconds: float) -> None:
    """Prints what share of a core the manager takes while ranks train, and while they wait between two steps."""

    def used(manager: int) -> float:
        words = Path(f"/proc/{manager}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    run.wait_for_steps(20, 600.0)
    manager, pause = run.process("h1", "-m autovaruna run"), run.hosts.shared / "pause"
    for what in ("at steps", "idle"):
        before, num_steps, begin = used(manager), len(run.steps), time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - begin
        share, rate = (used(manager) - before) / passed, (len(run.steps) - num_steps) / passed
        print(f"manager of {len(run.hosts.names)} hosts {what}: {share:.2%} of a core, {rate:.1f} steps/s", flush=True)
        pause.touch()
        time.sleep(2.0)
    pause.unlink()


def strike_job(
    hosts: Hosts, draw: random.Random, count: int, options: argparse.Namespace, faults: list[Fault]
) -> list[str]:
    """Strikes one job so many times, ends it, and compares it with one process."""
    words = ["--max_restarts", "1000"]
    if not options.processor:
        words += ["--checkpoints", str(hosts.shared / "checkpoints"), "--checkpoint_seconds", "2"]
    words += ["--start_seconds", f"{30 * options.patience:g}"] + ["--slow_factor", "100"] * ("slow" not in options.only)
    width, num_layers = WIDTH if "slow" in options.only else 32, max(4, len(hosts.names))
    script = [SCRIPT, NUM_STEPS, STEP_SECONDS, hosts.shared / "last", width, num_layers]
    run = ElasticRun(hosts, list(map(str, script)), words)
    striker = Striker(run, draw, options.only, faults, options.patience)
    try:
        if options.processor:
            print_processor(run, options.processor)
        striker.strike_all(count)
        run.stop_soon()
        status = run.finish(120.0 * options.patience)
        if status:
            striker.violations.append(f"the job ended with status {status}\n{run.text}")
        if others := run.differences():
            striker.violations.append(f"losses or weights are others: {others[:9]}\n{run.text}")
        left = leftovers(hosts, CLEAN_SECONDS * options.patience)
        if left:
            striker.violations.append(f"left: {left}\n{run.text}")
    except Exception as error:
        striker.violations.append(f"{type(error).__name__}: {error}\n{run.text}")
    finally:
        run.close()
        if options.log is not None:
            with options.log.open("a") as file:
                file.write(f"{run.text}\n=====\n")
    return striker.violations


def main() -> int:
    """Strikes; returns 1 if anything was not as it shall be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--faults-per-job", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[kind for kind in KINDS if kind != "slow"], choices=KINDS)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--patience", type=float, default=1.0, help="for a machine with other work: times all limits")
    parser.add_argument("--processor", type=float, default=0.0)
    parser.add_argument("--log", type=Path, help="a file that gets what jobs print")
    options = parser.parse_args()
    if reason_to_skip():
        print(f"SKIPPED: {reason_to_skip()}")
        return 0
    draw = random.Random(options.seed)
    faults: list[Fault] = []
    violations: list[str] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), Hosts(options.hosts) as hosts:
        while len(faults) < options.faults and len(violations) < 3:
            count = min(options.faults_per_job, options.faults - len(faults))
            wrong = strike_job(hosts, draw, count, options, faults)
            violations += wrong
            hosts.reset()
    report(faults, violations)
    return int(bool(violations))


def report(faults: list[Fault], violations: list[str]) -> None:
    """Prints medians by kind, and what went wrong."""
    by_kind: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_kind[fault.kind + (" (in recovery)" if fault.in_recovery else "")].append(fault)
    print(f"{'fault':24} {'n':>4} {'median s':>9} {'longest':>8} {'steps lost':>10}  phases, medians")
    for kind, struck in sorted(by_kind.items()):
        seconds = [fault.seconds for fault in struck]
        phases: dict[str, list[float]] = defaultdict(list)
        for fault in struck:
            for name, spent in fault.phases.items():
                phases[name].append(spent)
        words = ", ".join(f"{name} {median(spent):.2f}" for name, spent in phases.items())
        lost = Counter(fault.lost for fault in struck)
        most = ", ".join(f"{steps}: {times}" for steps, times in sorted(lost.items()))
        print(f"{kind:24} {len(struck):4} {median(seconds):9.2f} {max(seconds):8.2f} {most:>10}  {words}")
    for violation in violations:
        print(f"VIOLATION {violation}\n")
    print(f"{len(faults)} faults, {len(violations)} violations")


if __name__ == "__main__":
    sys.exit(main())
