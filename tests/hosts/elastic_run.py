"""Runs `autovaruna run` on emulated hosts, strikes it with faults, and says what came of it."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from glob import glob
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

from autovaruna.elastic.job_folder import Progress
from tests.hosts.emulation import Command, Hosts, wait_for
from tests.rank_threads import run_ranks

SCRIPT = Path(__file__).with_name("elastic_train.py")
_LOSS = re.compile(r"\[0\] loss (\d+) (\S+)")
_EVERY_STEP = re.compile(r"\[\d+\] (loss|took) ")
_COMPILED = "/tmp/torchinductor_"


def train_alone(*words: object) -> str:
    """Returns what a script, the first word, prints on one rank, which is a thread of this process."""
    printed = io.StringIO()
    with patch.object(sys, "argv", [*map(str, words)]), redirect_stdout(printed):
        run_ranks(1, lambda world: runpy.run_path(str(words[0]), run_name="__main__"))
    return printed.getvalue()


def differences(printed: str, *words: object) -> list[str]:
    """Returns the lines of runs of `SCRIPT` that one rank, asked with some words, does not print, and the other way."""
    texts = printed, train_alone(SCRIPT, *words)
    own, alone = (re.findall(r"(?:loss \d+|weights) \S+$", text, re.M) for text in texts)
    return [f"- {line}" for line in alone if line not in own] + [f"+ {line}" for line in own if line not in alone]


def stop_after(folder: Path, step: int) -> None:
    """Asks ranks that run `SCRIPT` in a folder to end after a step, which none of them has come to."""
    (folder / "stop.new").write_text(str(step))
    (folder / "stop.new").replace(folder / "stop")


class ElasticRun:
    """A job with a manager on the first host; `listed` are the hosts in the machine list at first, none: all."""

    def __init__(
        self, hosts: Hosts, script: Sequence[str | Path], options: Sequence[str] = (), listed: Sequence[str] = ()
    ) -> None:
        self.hosts = hosts
        self.lines: list[tuple[float, str]] = []
        self._machines, self._events = hosts.shared / "machines", hosts.shared / "events.jsonl"
        self._events.unlink(missing_ok=True)
        self.list_hosts(listed or hosts.names)
        files = ["--machine_list", str(self._machines), "--events", str(self._events)]
        call = [sys.executable, "-m", "autovaruna", "run", *files, "--ranks_per_host", "1"]
        self._script = script
        self._call = [*call, *options, *map(str, script)]
        self.start()

    def start(self) -> None:
        """Starts the manager; another time, as whoever finds it killed does."""
        self.command: Command = self.hosts.start("h1", self._call, cwd=self.hosts.shared)
        streams = self.command.stdout, self.command.stderr
        self._threads = [threading.Thread(target=self._read, args=(each,), daemon=True) for each in streams]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    @property
    def text(self) -> str:
        """All that was printed so far, with seconds, but for what each step prints."""
        start = self.lines[0][0] if self.lines else 0.0
        told = [f"{when - start:7.2f} {line}" for when, line in list(self.lines) if not _EVERY_STEP.match(line)]
        return "\n".join(told)

    @property
    def events(self) -> list[dict[str, Any]]:
        """What the events file has so far."""
        with suppress(FileNotFoundError):
            lines = self._events.read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    @property
    def steps(self) -> list[tuple[float, int, str]]:
        """When each step's loss was printed, on the monotonic clock, its number, and the loss."""
        lines = list(self.lines)
        return [(when, int(found[1]), found[2]) for when, line in lines if (found := _LOSS.match(line))]

    def list_hosts(self, names: Sequence[str]) -> None:
        """Writes the machine list, as a whole."""
        new = self._machines.with_suffix(".new")
        new.write_text("".join(f"{name}\n" for name in names))
        new.replace(self._machines)

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
        """Waits until a condition holds while the job runs; AssertionError, with all that it printed, if not."""
        try:
            wait_for(lambda: condition() or self.command.poll() is not None, what, seconds)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.text}") from None
        assert condition(), f"the job ended with status {self.command.poll()} before {what}\n{self.text}"

    def wait_for_steps(self, count: int, seconds: float = 120.0) -> None:
        """Waits until so many more steps are done."""
        goal = len(self.steps) + count
        self.wait(lambda: len(self.steps) >= goal, f"{count} more steps", seconds)

    def wait_for_event(self, kind: str, since: int, seconds: float = 120.0, **details: Any) -> dict[str, Any]:
        """Returns the first event of a kind, and with some details, after the first `since` events."""

        def found() -> list[dict[str, Any]]:
            return [event for event in self.events[since:] if event.items() >= {"event": kind, **details}.items()]

        self.wait(lambda: bool(found()), f"an event {kind}", seconds)
        return found()[0]

    def wait_until_training_on(self, names: Sequence[str], seconds: float = 90.0) -> None:
        """Returns once the newest run has come to a step, on some hosts, however many starts that takes."""

        def is_so() -> bool:
            last = [event for event in self.events if event["event"] in ("start", "running")][-2:]
            return [event["event"] for event in last] == ["start", "running"] and last[0]["hosts"] == names

        self.wait(is_so, f"training on {names}", seconds)

    def finish(self, seconds: float = 120.0) -> int:
        """Returns the status at the job's end; AssertionError if it does not end in time."""
        try:
            status = self.command.wait(seconds)
        except Exception:
            raise AssertionError(f"the job goes on after {seconds} s\n{self.text}") from None
        for thread in self._threads:
            thread.join(5.0)
        return status

    def stop_soon(self) -> None:
        """Lets the script of `SCRIPT` end after some more steps."""
        stop_after(self.hosts.shared, max(step for _, step, _ in self.steps) + 20)

    def differences(self) -> list[str]:
        """Returns the lines of a finished run of `SCRIPT` that one process does not print, and the other way round."""
        text = "\n".join(line for _, line in self.lines)
        return differences(text, self.steps[-1][1] + 1, 0, "nowhere", *self._script[4:])

    def close(self) -> None:
        """Kills it, if it still runs."""
        self.command.end()

    def ranks(self) -> dict[int, tuple[str, int]]:
        """Returns the host of each rank of the newest attempt, and its process as this machine knows it."""
        found: dict[int, tuple[int, str, int]] = {}
        for host in filter(self.hosts.is_up, self.hosts.names):
            known: dict[int, int] | None = None
            for folder in map(Path, glob(f"{self.hosts.path(host, '/dev/shm')}/autovaruna-*/attempt-*/rank-*")):
                attempt, rank = (int(name.rpartition("-")[2]) for name in (folder.parent.name, folder.name))
                progress = Progress.read(folder)
                known = known or {_inner(pid): pid for pid, _ in self.hosts.processes(host)}
                is_newer = rank not in found or found[rank][0] < attempt
                if progress is not None and progress.process in known and is_newer:
                    found[rank] = attempt, host, known[progress.process]
        newest = max((attempt for attempt, _, _ in found.values()), default=0)
        return {rank: (host, pid) for rank, (attempt, host, pid) in sorted(found.items()) if attempt == newest}

    def process(self, host: str, containing: str) -> int:
        """Returns a process of a host by its command line, not one that speaks with it elsewhere; 0: there is none."""
        found = self.hosts.processes(host, containing)
        return next((pid for pid, line in found if not line.startswith("ssh ")), 0)

    def strike(self, process: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to a process, if it is still there."""
        with suppress(ProcessLookupError):
            os.kill(process, number)


def leftovers(hosts: Hosts, seconds: float) -> list[str]:
    """Returns what jobs have left on hosts after so many seconds, files and processes."""

    def found() -> list[str]:
        left = []
        for host in filter(hosts.is_up, hosts.names):
            files = [file for file in hosts.leftovers(host) if not file.startswith(_COMPILED)]
            files += [str(file) for file in hosts.path(host, "/run/home/.autovaruna/jobs").glob("*")]
            left += [f"{host}: {file}" for file in files]
            left += [f"{host}: {pid} {line}" for pid, line in hosts.processes(host)]
        return left

    deadline = time.monotonic() + seconds
    while (left := found()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _inner(pid: int) -> int:
    """Returns the number that a process has on its own host."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return -1
