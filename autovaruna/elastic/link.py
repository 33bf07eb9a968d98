"""Defines `Link`: the manager's connection to the keeper of one host, over its standard streams."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from autovaruna.elastic.host_list import is_this_machine, slurm_nodes
from autovaruna.elastic.job import python_path

_CONNECT_SECONDS = 3
_PING_SECONDS = 0.5
"""How often a keeper is asked for its ranks."""
_OF_SRUN = ("--overlap", "--quiet", "--unbuffered", "--nodes=1", "--ntasks=1", "--mpi=none", "--chdir=/")
_MOST_WORDS = 4096  # of what a keeper or ssh writes, bytes
_MOST_MISSED = 6  # answers that may be missed: a pause of the manager's own, however long, is one


class Link:
    """The keeper of a host, from when it is started to when it is gone; `settings` are its first line."""

    def __init__(self, host: str, settings: dict[str, Any]) -> None:
        self.host = host
        self.attempt = 0  # the newest run of the job that the keeper has found on its host; 0: none
        self.held = -1, 0  # the newest step that ranks had left on the host, and of which run
        self.fault = ""  # why the script cannot run there, as far as that is known at once
        self.port = 0  # where other keepers and ranks find the keeper
        self.words = ""  # what the keeper or ssh wrote last, to say why it is gone
        self.began = time.monotonic()
        self.report: dict[str, Any] = {}  # the last one, of its ranks
        self.known: dict[int, int] = {}  # of each rank the last call whose seconds of work reports leave out
        self._num_missed = 0
        self._is_pinged = False
        self._name = ""
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            _command(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # a shell may greet in any letters
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path(os.environ)},
        )
        self._write(settings)
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    @property
    def is_up(self) -> bool:
        """Whether the keeper has said that it is there, and has not gone."""
        return self.port > 0 and self._process.poll() is None

    @property
    def is_gone(self) -> bool:
        """Whether the keeper has gone, or could not be started."""
        return self._process.poll() is not None

    @property
    def is_ready(self) -> bool:
        """Whether ranks can be started there without delay."""
        return self.is_up and bool(self.report.get("is_ready"))

    @property
    def is_silent(self) -> bool:
        """Whether the host has not answered for so long that it counts as lost."""
        return self._num_missed >= _MOST_MISSED

    @property
    def address(self) -> str:
        """What other hosts find this one by: as it is listed, since its name may mean nothing to them."""
        name = self.host.rpartition("@")[2]
        return self._name if name in ("localhost", "::1") or name.startswith("127.") else name

    @property
    def is_answering(self) -> bool:
        """Whether the keeper is up and has missed no question."""
        return self.is_up and not self._num_missed

    def ask(self, do: str, **arguments: Any) -> Future[Any]:
        """Asks the keeper to do something; the answer comes later, or an OSError if the keeper goes."""
        answer: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            self._waiting[number] = answer
        if not self._write({"id": number, "do": do, **arguments}):
            self._fail()
        return answer

    def quit(self, keeps: bool = False) -> None:
        """Has the keeper remove what is the job's and end, or keep it, as where its manager was killed."""
        if not keeps:
            self._write({"do": "quit"})
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Returns when the keeper has ended, or is cut off."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.cut()

    def cut(self) -> None:
        """Gives up a keeper that does not answer; if it runs on, it ends by itself."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with what ssh has started, as a ProxyCommand

    def _write(self, request: dict[str, Any]) -> bool:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError, KeyError, TypeError, RecursionError):  # a shell may greet
                self._receive(json.loads(line))
        self._process.wait()
        self._fail()

    def ping(self) -> None:
        """Asks for a report, which comes later; a keeper that is silent is cut off, so that nobody waits for it."""
        if not self.is_up:
            return
        if self._is_pinged or self._lock.locked():  # a request that nobody reads holds it
            self._num_missed += 1
            if self.is_silent:
                self.cut()
            return
        self._is_pinged = True
        self.ask("ping", known=self.known).add_done_callback(self._record)

    def _record(self, answer: Future[dict[str, Any]]) -> None:
        if answer.exception() is None:
            self.report, self._num_missed, self._is_pinged = answer.result(), 0, False

    def _receive(self, found: dict[str, Any]) -> None:
        if "port" in found:
            self._name, self.attempt, self.fault = found["host"], found["attempt"], found["fault"]
            self.held = found["held"][0], found["held"][1]
            self.port = found["port"]
            return
        with self._lock:
            answer = self._waiting.pop(found["id"], None)
        if answer is not None and "error" in found:
            answer.set_exception(OSError(f"{self.host}: {found['error']}"))
        elif answer is not None:
            answer.set_result(found["result"])

    def _fail(self) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for answer in waiting:
            answer.set_exception(OSError(f"the keeper of {self.host} has gone"))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        text = ""
        while data := os.read(self._process.stderr.fileno(), _MOST_WORDS):  # a question of ssh is no whole line
            text = (text + data.decode(errors="replace"))[-_MOST_WORDS:]
            self.words = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), self.words)


def _command(host: str) -> list[str]:
    """Returns how the keeper of a host is started: over ssh, or by Slurm on its nodes, unless it is this host."""
    call = [sys.executable, "-m", "autovaruna.elastic.keeper"]
    if is_this_machine(host):
        return call
    if host in slurm_nodes():
        return ["srun", *_OF_SRUN, "--nodelist", host, *call]
    return over_ssh(host, call)


def over_ssh(host: str, call: list[str]) -> list[str]:
    """Returns a call of Python as it is made on another host, which ssh reaches without a password."""
    there = ["env", f"PYTHONPATH={python_path(os.environ)}", *call]
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
    return ["ssh", *options, host, f"cd / && exec {shlex.join(there)}"]


def ping_all(links: Mapping[str, Link], is_over: threading.Event) -> None:
    """Asks keepers for reports, again and again, until it is over."""
    while not is_over.wait(_PING_SECONDS):
        for link in list(links.values()):
            link.ping()


def answers(pending: dict[str, Future[Any]], seconds: float) -> dict[str, Any]:
    """Returns what has been answered in time, by host."""
    deadline = time.monotonic() + seconds
    found = {}
    for host, answer in pending.items():
        with suppress(Exception):
            found[host] = answer.result(max(0.0, deadline - time.monotonic()))
    return found
