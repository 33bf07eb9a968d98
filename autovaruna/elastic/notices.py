"""The events that a job reports, and the notices that it gets, on hosts with one HOME, of hosts that will go."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autovaruna.config.files import at_home, read_record, write_whole
from autovaruna.elastic.host_processes import birth_of
from autovaruna.elastic.job import show
from autovaruna.errors import ConfigError
from autovaruna.ranks.tls import Authority, Connection, Server, connect

_FOLDER = "~/.autovaruna/jobs"
_MANAGER, _NOTIFIER = "manager", "notifier"  # their names in a job
EXAMPLE = "autovaruna notify node07 --seconds 120"


class EventLog:
    """The events of one job, each a line on stderr, and a line of JSON in a file if there is one."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def record(self, what: str, text: str, *, is_shown: bool = True, **details: Any) -> None:
        """Records an event: its kind, in one word; what happened, for a person; and details, for programs."""
        if is_shown:
            show(sys.stderr, f"autovaruna: {text}\n")
        if self._path is not None:
            line = json.dumps({"time": round(time.time(), 3), "event": what, "text": text, **details})
            with suppress(OSError):
                Path(self._path).parent.mkdir(parents=True, exist_ok=True)
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(line + "\n")


@dataclass(frozen=True)
class Address:
    """How the manager of a job is reached, and what keepers know it by; the file can be read by its user alone."""

    host: str
    port: int
    key: str  # of the job's authority
    process: int
    birth: str  # of the process
    job: str
    folder: str
    attempt: int = 0  # the newest run
    asked: Mapping[str, str] = field(default_factory=dict)  # what the job was started with, beside its name
    silent_seconds: float = 0.0  # for how long the file had not been touched when it was found

    def write(self, path: Path) -> None:
        """Writes the file, if there is a HOME that can be written to; else there are no notices from elsewhere."""
        before = os.umask(0o077)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(path, json.dumps(vars(self)), is_synced=False)
        os.umask(before)

    @property
    def is_dead(self) -> bool:
        """Whether the manager was one of this machine, and has ended; its number may be another process's by now."""
        return self.host == socket.gethostname() and birth_of(self.process) != self.birth


def new_address_file() -> Path:
    """Returns the path of a file that tells how a manager is reached."""
    return Path(at_home(_FOLDER), f"{secrets.token_hex(8)}.json")


def own_address(authority: Authority, job: str, folder: str, attempt: int, asked: Mapping[str, str]) -> Address:
    """Returns the address of this process, which is the manager of a job, but for the port."""
    own = os.getpid()
    return Address(socket.gethostname(), 0, authority.key, own, birth_of(own), job, folder, attempt, asked)


@contextmanager
def receiving_notices(
    path: Path, record: Callable[[str, float], str], authority: Authority, own: Address
) -> Iterator[Address]:
    """Receives notices within the context, by an address in a file, which stays if the manager is killed.

    `record` gets a host and after how many seconds it goes, and returns a complaint, empty if there is none.
    """

    def answer(connection: Connection, request: Mapping[str, Any]) -> None:
        fault = record(str(request["host"]), float(request["seconds"]))
        connection.send_bytes(json.dumps({"fault": fault}).encode())

    address = replace(own, port=Server(authority.credentials(_MANAGER), answer).port)
    address.write(path)
    try:
        yield address
    finally:
        path.unlink(missing_ok=True)


def _addresses() -> Iterator[tuple[Path, Address]]:
    """Yields the files of this user's managers that can be used, with what they say."""
    for path in sorted(Path(at_home(_FOLDER)).glob("*.json")):
        with suppress(OSError, ValueError, RecursionError):
            address = read_record(json.loads(path.read_bytes()), Address)
            Authority(address.key)
            yield path, address


def pop_dead_manager(job: str, own: Path) -> Address | None:
    """Returns the address of a killed manager of the same job, once; None: there was none.

    The file `own` has it from then on: the next manager finds it there if this one is killed before it has an address.
    """
    for path, address in _addresses():
        if address.job == job and address.is_dead:
            with suppress(OSError):
                silent = time.time() - path.stat().st_mtime  # its manager touches it
                address = replace(address, process=os.getpid(), birth=birth_of(os.getpid()), silent_seconds=silent)
                address.write(own)
                path.unlink()
                return address
            own.unlink(missing_ok=True)  # another manager was quicker
    return None


def notify_manager_preempt(host: str, seconds: float = 30.0) -> int:
    """Tells the managers of this user's jobs that a host, as machine lists have it, will be taken away in some seconds.

    Returns:
        How many jobs leave it.

    Raises:
        ConfigError: there is no such job.
    """
    if seconds < 0:
        raise ConfigError(f"seconds is {seconds}; expected after how many seconds {host} goes, 0 or more")
    faults = []
    for path, address in _addresses():
        try:
            own = Authority(address.key).credentials(_NOTIFIER)
            at = "localhost" if address.host == socket.gethostname() else address.host  # a name may be of no use
            with connect(at, address.port, own, _MANAGER) as connection:
                connection.send_bytes(json.dumps({"host": host, "seconds": seconds}).encode())
                faults.append(json.loads(connection.recv_bytes())["fault"])
        except (OSError, EOFError, ValueError):
            if address.is_dead:
                path.unlink(missing_ok=True)
    num_notified = faults.count("")
    if not num_notified:
        raise ConfigError(
            f"no job was told that {host} goes: {'; '.join(faults) or 'none of this user runs'}. Expected a host in "
            "the machine list of a job that `autovaruna run` looks after"
        )
    return num_notified


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the host and its time."""
    parser.add_argument("host", metavar="HOST", help="as the machine list has it")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="after which it goes (30)")


def run(options: argparse.Namespace) -> None:
    """Tells the jobs of this user that a host will be taken away: they finish the step, and go on without it in
    time.
    """
    notify_manager_preempt(options.host, options.seconds)
