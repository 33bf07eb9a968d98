"""The hosts of a job: of a machine list, of a command that prints one, or of the allocation of Slurm, PBS or LSF."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import PIPE

from autovaruna.errors import ConfigError

_JOB, _NODES, _TASKS = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"
_SECONDS = 30.0  # that a command may take
_RANKS_PER_HOST = 4
_MOST_CHARACTERS = 131_071  # of a line: the system takes no longer variables
_MOST_BYTES = 1 << 20  # that a command may print
_HOST = re.compile(r"([A-Za-z0-9_.-]+@)?[A-Za-z0-9_:][A-Za-z0-9_.:%-]*")


def list_hosts(path: str | None, num_slots: int | None, command: str | None) -> dict[str, int]:
    """Returns the ranks of each machine, by whatever names a file or a command lists it, or the allocation has."""
    if path is None and command is None and (lines := allocated_lines(num_slots)):
        return dict(Counter(lines))  # a scheduler has one name for a host
    num_slots = num_slots or _RANKS_PER_HOST
    if command is None:
        if path is None:
            return {"localhost": num_slots}
        lines = read_lines(path, "--machine_list", "a machine a line")
        return _hosts_in(lines, f"--machine_list {path}", num_slots)
    return _hosts_in(_printed_by(command).splitlines(), f"--discover_hosts {command!r}", num_slots)


def _printed_by(command: str) -> str:
    """Returns what a shell's command prints; ConfigError if it fails, or takes long, as one that prints for ever."""
    shell = subprocess.Popen(command, shell=True, stdout=PIPE, stderr=PIPE, start_new_session=True)
    errors, began = deque[bytes](maxlen=3), time.monotonic()

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # what the shell has started, too

    def drain() -> None:
        assert shell.stderr is not None
        with shell.stderr:
            errors.extend(shell.stderr)

    timer, draining = threading.Timer(_SECONDS, kill), threading.Thread(target=drain, daemon=True)
    timer.daemon = True
    timer.start()
    draining.start()
    assert shell.stdout is not None
    with shell.stdout:
        out = shell.stdout.read(_MOST_BYTES)
        shell.wait()
    timer.cancel()
    if time.monotonic() - began > _SECONDS:
        raise ConfigError(f"--discover_hosts {command!r} takes longer than {_SECONDS:.0f} s")
    if shell.returncode:
        draining.join(1.0)
        raise ConfigError(
            f"--discover_hosts {command!r} ended with status {shell.returncode}: "
            f"{b''.join(errors).decode(errors='replace').strip()[-300:]}; expected a machine a line"
        )
    return out.decode(errors="replace")


def _hosts_in(lines: Sequence[str], source: str, num_slots: int) -> dict[str, int]:
    names = [line.partition("#")[0].strip() for line in lines]
    machines: dict[str, int] = {}
    for name in filter(None, names):
        if not _HOST.fullmatch(name) or name.count(":") == 1:
            raise ConfigError(
                f"{source} holds {name!r:.80}; expected one name or address a line, of letters, digits "
                "and the characters . _ - %, and : in an IPv6 address. A host has other numbers of ranks if it is "
                "listed several times"
            )
        if is_this_machine(name):  # mpirun would take two of its names for two machines, and then refuse them
            name = next(filter(is_this_machine, machines), "localhost" if ":" in name else name)
        elif len(machines) and name not in machines:
            name = next((known for known in machines if is_one(known, name)), name)
        machines[name] = machines.get(name, 0) + num_slots
    if not machines:
        raise ConfigError(f"{source} lists no machine; expected one a line, as localhost")
    return machines


def is_this_machine(name: str) -> bool:
    """Says whether a name or address is that of the machine that this runs on, whatever machine that is."""
    name, own = name.rpartition("@")[2], socket.gethostname()
    of_slurm = os.environ.get("SLURMD_NODENAME", own)  # in a job; a node may have another name than its machine
    if name in ("localhost", "::1", own, own.partition(".")[0], of_slurm) or name.startswith("127."):
        return True
    return name.count(".") == 3 and _has_address(name)


def _has_address(address: str) -> bool:
    """Says whether an address is one of this machine's: nobody can listen at another's."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tried:
            tried.bind((address, 0))
    except (OSError, UnicodeError):  # of the latter for what is no name at all, as ``a..b.c``
        return False
    return True


def is_one(first: str, second: str) -> bool:
    """Says whether two names or addresses are of one machine; what cannot be looked up is another one."""
    try:
        own, other = (socket.getaddrinfo(name.rpartition("@")[2], None) for name in (first, second))
    except (OSError, UnicodeError):
        return False
    return not {entry[4][0] for entry in own}.isdisjoint(entry[4][0] for entry in other)


def read_lines(file: str, option: str, expected: str) -> list[str]:
    """Returns the lines of a text file that an option names; ConfigError if it cannot be read."""
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{option} {file} cannot be read: {why}; expected {expected}") from None
    for number, line in enumerate(lines, 1):
        if len(line) > _MOST_CHARACTERS or "\0" in line:
            fault = "a zero byte" if "\0" in line else f"{len(line)} characters; at most {_MOST_CHARACTERS} can be"
            raise ConfigError(f"{option} {file}, line {number} has {fault}. Expected {expected}")
    return lines


def allocated_lines(num_slots: int | None, variables: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the hosts of the allocation, each as often as it is to have ranks; none: this is no allocation."""
    if names := slurm_nodes(variables):
        text = variables.get(_TASKS, "")
        counts = [1] * len(names) if num_slots else _counts(text)
        if len(counts) != len(names):  # as in a step of some of the job's nodes
            raise ConfigError(f"{_TASKS} is {text!r} for {len(names)} nodes of Slurm; pass --ranks_per_host")
        listed = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    elif file := variables.get("PBS_NODEFILE"):
        try:
            listed = Path(file).read_text(encoding="utf-8").split()
        except OSError as error:
            raise ConfigError(f"PBS_NODEFILE {file} cannot be read: {error.strerror}; pass --machine_list") from None
    else:
        listed = variables.get("LSB_HOSTS", "").split()
    return [name for name in dict.fromkeys(listed) for _ in range(num_slots)] if num_slots else listed


def slurm_nodes(variables: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the names of the nodes of Slurm's allocation; none: this is none."""
    nodes = variables.get(_NODES, "")
    return _names_of(nodes) if nodes and _JOB in variables else ()


def check_requeue(variables: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError where no job of Slurm could be put into its queue again."""
    if _JOB not in variables:
        raise ConfigError(f"--requeue asks Slurm, but {_JOB} is not set; expected to run in a batch job of Slurm")


def requeue(variables: Mapping[str, str] = os.environ) -> None:
    """Has Slurm put this job into its queue again, and end what is left of it now."""
    _scontrol("requeue", variables[_JOB])


@cache
def _names_of(nodes: str) -> tuple[str, ...]:
    return tuple(_scontrol("show", "hostnames", nodes).split())


def _counts(text: str) -> list[int]:
    """Returns the numbers in Slurm's form: 4, 4, 1 of ``4(x2),1``."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]


def _scontrol(*words: str) -> str:
    command = " ".join(("scontrol", *words))
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"`{command}` cannot be run ({error}); expected Slurm's scontrol on PATH") from None
    if done.returncode:
        raise ConfigError(f"`{command}` ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout
