"""Emulates hosts on one machine, out of namespaces: each has a network, a name, processes, and files of its own.

    with Hosts(2) as hosts:
        hosts.run("h1", ["ssh", "h2", "hostname"])  # a real sshd runs on each; root needs no password
        hosts.kill("h2", power_loss=True)

The hosts are h1, h2, ... at 10.77.0.1, 10.77.0.2, ... on a switch of their own; the machine's own network stays as it
is. /tmp, /dev/shm, /run, and HOME belong to a host; all other folders are the machine's and are shared, as is
`Hosts.shared`. Root is needed, and what `reason_to_skip` looks for. Hosts end with the thread that made them at the
latest, also where it is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "10.77.0"
HOME = "/run/home"
WAIT_SECONDS = 60.0
"""The longest wait for anything that the harness itself does."""
POLL_SECONDS = 0.02
TOOLS = {
    **dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux"),
    **dict.fromkeys(("ssh", "ssh-keygen"), "openssh-client"),
    **{"mount": "mount", "hostname": "hostname", "ip": "iproute2", "tc": "iproute2", "sshd": "openssh-server"},
}
"""What is needed, and the Debian package that has it."""
PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {
    **{"PATH": PATH, "HOME": HOME, "USER": "root", "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    **{"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"},
}
"""The variables that a command on a host starts with: few, and none of this process's own."""
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
_UNSHARE = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
_MARK = "EMULATED_COMMAND"
_CLEAN = ("setsid", "env", "-i")
_STARTING = ("nsenter --target ", " ".join(_CLEAN), " ".join(_CLEAN[1:]))
"""What command lines begin with for the moment in which a command starts."""


@cache
def reason_to_skip() -> str:
    """Returns why hosts cannot be emulated here, empty if they can."""
    if os.geteuid() != 0:
        return "emulated hosts need root"
    missing = {tool: package for tool, package in TOOLS.items() if shutil.which(tool, path=PATH) is None}
    if missing:
        return f"{', '.join(missing)} missing: apt-get install {' '.join(sorted(set(missing.values())))}"
    probe = "mount -t tmpfs none /dev/shm && hostname probe && ip link add dev v0 type veth peer name v1"
    done = _run([*_UNSHARE, "sh", "-c", probe], check=False)
    return "" if done.returncode == 0 else f"namespaces are not allowed here: {done.stdout.strip()}"


class Command(subprocess.Popen[str]):
    """A command on a host; signals go to the command itself, not to the nsenter that waits for it."""

    mark: str

    def send_signal(self, number: int) -> None:
        wait_for(lambda: self.poll() is not None or bool(_children(self.pid)), "a command that starts")
        for pid in _children(self.pid):
            _signal(pid, number)

    def end(self) -> None:
        """Kills the command and all that it started on its host."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (left := _marked(self.mark)) and time.monotonic() < deadline:
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        if self.poll() is None:
            super().send_signal(signal.SIGKILL)
        self.wait(WAIT_SECONDS)


class Hosts:
    """Some emulated hosts, from entering the context until leaving it.

    Args:
        count: How many.
        rate: What a host may send in a second, as tc writes it: ``100mbit``; empty: no limit.
        switch: What joins them, in place of a `Switch` of this file.
    """

    def __init__(self, count: int, rate: str = "", switch: Any = None) -> None:
        self.names = [f"h{place}" for place in range(1, count + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix="emulated-hosts-"))
        self.shared = self.folder / "shared"  # is the same on all hosts
        self.shared.mkdir()
        everywhere = [self.shared, ROOT, sys.prefix, sys.base_prefix]
        self._seen_in_tmp = [path for path in map(str, everywhere) if path.startswith("/tmp/")]
        self._switch = switch or Switch()
        self._rate = rate
        self._machines: dict[str, subprocess.Popen[bytes]] = {}
        self._first_pids: dict[str, int] = {}
        self._own_files: dict[str, set[str]] = {}
        self._cut: set[str] = set()

    def __enter__(self) -> Hosts:
        try:
            _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "key")])
            lines = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in self.names)]
            (self.folder / "hosts").write_text("\n".join(lines) + "\n")
            self._switch.start()
            for name in self.names:
                self.boot(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all hosts and the switch, and removes their files."""
        for name in list(self._machines):
            self.kill(name)
        self._switch.close()
        shutil.rmtree(self.folder)

    def address(self, host: str) -> str:
        """Returns a host's IP address."""
        return f"{NETWORK}.{self._place(host)}"

    def is_up(self, host: str) -> bool:
        """Returns whether a host is there, its cable in or out."""
        return host in self._machines and self._machines[host].poll() is None

    def boot(self, host: str) -> None:
        """Starts a host that is not there, with no files of its own, and waits until its sshd listens."""
        assert not self.is_up(host), f"{host} is up already"
        place, log = self._place(host), self.folder / f"{host}.log"
        words = [str(self.folder), host, self.address(host), f"02:77:00:00:00:{place:02x}", *self._seen_in_tmp]
        with log.open("wb") as file:
            call = ["setpriv", "--pdeathsig", "KILL", *_UNSHARE, str(Path(__file__).with_name("host.sh")), *words]
            machine = subprocess.Popen(
                call, stdin=DEVNULL, stdout=file, stderr=file, env={"PATH": PATH}, start_new_session=True
            )
        self._machines[host] = machine
        wait_for(lambda: machine.poll() is not None or bool(_children(machine.pid)), f"the first process of {host}")
        if machine.poll() is None:
            self._first_pids[host] = _children(machine.pid)[0]
            self._switch.plug(place, self._first_pids[host])
            self._cut.discard(host)
            wait_for(lambda: machine.poll() is not None or "Server listening" in log.read_text(), f"sshd of {host}")
            if self._rate and machine.poll() is None:
                limit = ["tbf", "rate", self._rate, "burst", "128kb", "limit", "4mb"]
                _run([*self._entering(host), "tc", "qdisc", "add", "dev", "eth0", "root", *limit])
        if machine.poll() is not None:
            raise RuntimeError(f"{host} does not start: {log.read_text()}")
        self._own_files[host] = set(self._files(host))

    def kill(self, host: str, power_loss: bool = False) -> None:
        """Ends all processes of a host at once; its files are gone. At a power loss its cable is out first."""
        if power_loss:
            self.cut(host)
        machine = self._machines.pop(host)
        if machine.poll() is None and host in self._first_pids:
            _signal(self._first_pids[host], signal.SIGKILL)
        machine.kill()
        machine.wait(WAIT_SECONDS)
        self._first_pids.pop(host, None)

    def stop_sshd(self, host: str) -> None:
        """Stops a host's sshd: it takes connections and is silent; those that there are go on."""
        _signal(self._first_pids[host], signal.SIGSTOP)

    def continue_sshd(self, host: str) -> None:
        """Lets a host's sshd go on."""
        _signal(self._first_pids[host], signal.SIGCONT)

    def cut(self, host: str) -> None:
        """Pulls a host's cable out; nobody is told."""
        self._switch.set_port(self._place(host), "down")
        self._cut.add(host)

    def mend(self, host: str) -> None:
        """Puts a host's cable in again."""
        self._switch.set_port(self._place(host), "up")
        self._cut.discard(host)

    def start(
        self, host: str, words: Sequence[str | Path], cwd: str | Path = HOME, env: Mapping[str, str] | None = None
    ) -> Command:
        """Starts a command in a session of its own; its output is piped. `env` is added to `ENVIRONMENT`."""
        mark = uuid.uuid4().hex
        variables = {**ENVIRONMENT, **(env or {}), _MARK: mark}
        assignments = [f"{name}={value}" for name, value in variables.items()]
        call = [*self._entering(host), *_CLEAN, f"--chdir={cwd}", *assignments, *map(str, words)]
        started = Command(call, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)
        started.mark = mark
        return started

    def run(
        self, host: str, words: Sequence[str | Path], cwd: str | Path = HOME, timeout: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, as `start`; what takes longer is killed with all that it started on its host.

        Raises:
            AssertionError: It took longer, or, if `check`, its status is not zero; with all that it printed.
        """
        process = self.start(host, words, cwd)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            process.end()
            out, err = process.communicate(timeout=WAIT_SECONDS)
            raise AssertionError(f"{words} on {host} took longer than {timeout} s\n{out}\n{err}") from error
        assert not (check and process.returncode), f"{words} on {host}: status {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def processes(self, host: str, containing: str = "") -> list[tuple[int, str]]:
        """Returns the processes of a host but its first one, as (number, command line), by a part of the latter.

        The numbers are this machine's, as os.kill takes them; the host's own are others.
        """
        if not self.is_up(host):
            return []
        first = self._first_pids[host]
        own = _namespace(first)
        every = psutil.process_iter(["cmdline"])  # of which one that has ended and waits to be told of has none
        inside = [each for each in every if own and _namespace(each.pid) == own and each.pid != first]
        found = [(each.pid, " ".join(each.info["cmdline"] or ())) for each in inside]
        return [(pid, line) for pid, line in found if line and containing in line and not line.startswith(_STARTING)]

    def path(self, host: str, path: str) -> Path:
        """Returns where this machine sees a file of a host, as ``/tmp/x``."""
        return Path(f"/proc/{self._first_pids[host]}/root{path}")

    def leftovers(self, host: str) -> list[str]:
        """Returns all that came into a host's /tmp and /dev/shm since it started, shared folders apart."""
        return [file for file in self._files(host) if file not in self._own_files[host]]

    def reset(self) -> None:
        """Makes hosts as if they had just started: all there, cables in, no command, no leftovers, nothing shared."""
        for name in self.names:
            if not self.is_up(name):
                self._machines.pop(name, None)
                self.boot(name)
            if name in self._cut:
                self.mend(name)
            self.continue_sshd(name)
            wait_for(lambda name=name: self._is_empty(name), f"the end of all processes of {name}")
        for name in self.names:
            for file in reversed(self.leftovers(name)):
                _remove(self.path(name, file))
        for path in self.shared.iterdir():
            _remove(path)

    def _is_empty(self, host: str) -> bool:
        """Kills all processes of a host but its first, sshd; says whether there were none."""
        left = self.processes(host)
        for pid, _ in left:
            _signal(pid, signal.SIGKILL)
        return not left

    def _place(self, host: str) -> int:
        return self.names.index(host) + 1

    def _entering(self, host: str) -> list[str]:
        assert self.is_up(host), f"{host} is not there"
        return ["nsenter", "--target", str(self._first_pids[host]), *NAMESPACES, "--"]

    def _files(self, host: str) -> list[str]:
        """Returns all paths in the host's own part of /tmp and /dev/shm, folders before what is in them."""
        top = self.path(host, "")
        found = []
        for start in ("tmp", "dev/shm"):
            for folder, folders, files in os.walk(top / start):
                found += ["/" + str(Path(folder, name).relative_to(top)) for name in [*folders, *files]]
                folders[:] = [name for name in folders if not os.path.ismount(Path(folder, name))]
        return found


class Switch:
    """Joins hosts in a network of its own, which ends with it."""

    def start(self) -> None:
        """Makes the network."""
        self._process = subprocess.Popen(["unshare", "--net", "cat"], stdin=PIPE, start_new_session=True)
        own = os.readlink("/proc/self/ns/net")
        wait_for(lambda: os.readlink(f"/proc/{self._process.pid}/ns/net") != own, "the switch's network")
        self._ip("link", "add", "dev", "bridge", "type", "bridge")
        self._ip("link", "set", "dev", "bridge", "up")

    def plug(self, place: int, pid: int) -> None:
        """Gives the host of a process an eth0 that is joined to all others."""
        port = f"port{place}"
        # A host's network outlives it while its sockets say goodbye, and may go while it is looked at.
        _run([*self._entering(), "ip", "link", "delete", "dev", port], check=False)
        self._ip("link", "add", "dev", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._ip("link", "set", "dev", port, "master", "bridge", "up")

    def set_port(self, place: int, state: str) -> None:
        """Pulls a cable out (``down``), or puts it in (``up``)."""
        self._ip("link", "set", "dev", f"port{place}", state)

    def close(self) -> None:
        """Ends the network."""
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.communicate(timeout=WAIT_SECONDS)

    def _ip(self, *words: str) -> None:
        _run([*self._entering(), "ip", *words])

    def _entering(self) -> list[str]:
        return ["nsenter", "--target", str(self._process.pid), "--net", "--"]


def wait_for(condition: Callable[[], object], what: str | Callable[[], str], seconds: float = WAIT_SECONDS) -> None:
    """Waits until a condition holds; TimeoutError that says what, or what that is by then, after the seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what() if callable(what) else what}")
        time.sleep(POLL_SECONDS)


def _run(command: Sequence[str], check: bool = True) -> subprocess.CompletedProcess[str]:
    streams = {"stdin": DEVNULL, "stdout": PIPE, "stderr": STDOUT}
    done = subprocess.run(command, **streams, text=True, timeout=WAIT_SECONDS, env={"PATH": PATH})
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout.strip() or f'status {done.returncode}'}")
    return done


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(pid: int) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def _namespace(pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _marked(mark: str) -> list[int]:
    """Returns the processes that have a mark in their environment."""
    return [each.pid for each in psutil.process_iter(["environ"]) if (each.info["environ"] or {}).get(_MARK) == mark]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
