"""Is the standby process of a host: it has imported what ranks import, and is forked to become one.

A start of Python with torch takes seconds of the processor, a fork milliseconds. Nothing of CUDA is touched, and no
thread is started, before the fork.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autovaruna
from autovaruna.elastic import rank_script
from autovaruna.elastic.host_processes import acquire_lock, state_of
from autovaruna.elastic.job_folder import Reporter, job_place
from autovaruna.ranks.system import process_file

LOCK, SOCKET = "keeper.lock", "standby"  # files of a job's folder: its keeper's, and its standby process's
LIBRARIES = ("accelerate", "lightning", "transformers")  # take longer than torch, and few scripts use them
_FIRST_DELAY_SECONDS = 0.5
_NOT_IMPORTED = ("__main__", "run_varuna")
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # counts GPUs without the driver, which no fork could use afterwards
_LOOK_SECONDS = 1.0
_MOST_LOOKS = 20  # how long the process outlives the host's keeper, for a new one to come
_PEER = struct.Struct("3i")  # a process, its user and its group
_LENGTH_BYTES, _NUM_FILES = 8, 3  # what a stub sends first: how long its variables are, and its standard streams


@dataclass
class _Rank:
    """A rank that was forked: its process, and the connection of the stub that mpirun knows."""

    process: int
    file: int
    stub: socket.socket


def serve(path: Path, keeper_lock: Path) -> None:
    """Forks a rank for each stub that connects; returns in a process that has become one, or ends without a keeper."""
    listener = socket.socket(socket.AF_UNIX)
    path.unlink(missing_ok=True)
    listener.bind(str(path))
    listener.listen(256)
    ranks: dict[int, _Rank] = {}
    num_alone = 0
    while num_alone < _MOST_LOOKS:
        files = [listener.fileno(), *(rank.file for rank in ranks.values()), *ranks]
        ready = select.select(files, [], [], _LOOK_SECONDS)[0]
        if not ready:
            num_alone = 0 if _is_held(keeper_lock) else num_alone + 1
        if listener.fileno() in ready and _fork(listener, ranks):
            return
        for number, rank in list(ranks.items()):
            if rank.file in ready or number in ready:
                _end(rank)
                del ranks[number]
    for rank in ranks.values():
        _end(rank)
    path.unlink(missing_ok=True)
    os._exit(0)


def _is_held(lock: Path) -> bool:
    """Says whether a process has a lock."""
    try:
        file = acquire_lock(lock)
    except OSError:
        return False
    if file is not None:
        os.close(file)
    return file is None


def _fork(listener: socket.socket, ranks: dict[int, _Rank]) -> bool:
    """Forks a rank for a stub; returns True in the process that is the rank."""
    stub, _ = listener.accept()
    try:
        stub.settimeout(5.0)
        length, files, _, _ = socket.recv_fds(stub, _LENGTH_BYTES, _NUM_FILES)
        if len(files) != _NUM_FILES:
            raise ValueError("it has not sent its files")
        with stub.makefile("rb") as rest:
            job = json.loads(rest.read(int.from_bytes(length, "little")))
        stub.settimeout(None)
    except (OSError, ValueError):
        stub.close()
        return False
    process = os.fork()
    if process == 0:
        for each in (listener, stub, *(rank.stub for rank in ranks.values())):
            each.close()
        for rank in ranks.values():
            os.close(rank.file)
        _become(job, files)
        return True
    for file in files:
        os.close(file)
    with suppress(OSError):
        stub.sendall(f"{process}\n".encode())
    ranks[stub.fileno()] = _Rank(process, process_file(process), stub)
    return False


def _become(job: dict[str, Any], files: Sequence[int]) -> None:
    """Gives this process the files, variables, folder and process group of a rank."""
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.setpgid(0, 0)
    variables = job["variables"]
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(job["folder"])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.path[1:1] = [each for each in variables.get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
    asked = variables.get("OMP_NUM_THREADS", "")
    sys.modules["torch"].set_num_threads(int(asked) if asked.isdigit() else len(os.sched_getaffinity(0)))


def _end(rank: _Rank) -> None:
    """Tells a stub how its rank has ended; a rank whose stub has gone is killed first, with all that it started."""
    with suppress(OSError):
        os.killpg(rank.process, signal.SIGKILL)  # what a rank that has ended itself left, too
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(rank.process, 0)[1])
    except ChildProcessError:
        status = 1
    with suppress(OSError):
        rank.stub.sendall(f"{status}\n".encode())
    rank.stub.close()
    os.close(rank.file)


def warm(libraries: Sequence[str]) -> None:
    """Imports what a rank uses: slow parts of torch, and those of `LIBRARIES` that the script names."""
    import mpi4py
    import torch

    mpi4py.rc.initialize = False
    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(autovaruna.__path__, "autovaruna."):
        room, _, name = module.name.rpartition(".")
        if name not in _NOT_IMPORTED and (room != "autovaruna.integrations" or name in libraries):
            with suppress(ImportError):  # of a library that is not installed
                importlib.import_module(module.name)
    from autovaruna._torch import IMPORTED_LATE

    for name in IMPORTED_LATE:
        with suppress(ImportError):
            importlib.import_module(name)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    gc.collect()
    gc.freeze()


class StandbyProcess:
    """Sees to it that the host has a standby process, which outlives this one and may be an earlier keeper's."""

    def __init__(self, folder: Path, libraries: Sequence[str]) -> None:
        self._folder, self._libraries = folder, libraries
        self._process: subprocess.Popen[bytes] | None = None
        if not _listener(folder / SOCKET):
            self._start()
        threading.Thread(target=self._supervise, daemon=True).start()

    @property
    def fault(self) -> str:
        """What a process wrote last that has failed, as where torch is missing; empty: it has not."""
        if self._process is None or (self._process.poll() or 0) <= 0:
            return ""
        lines = (self._folder / "standby.log").read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"status {self._process.returncode}")

    def _supervise(self) -> None:
        delay = _FIRST_DELAY_SECONDS
        while True:
            time.sleep(delay)
            own = self._process
            process = _listener(self._folder / SOCKET) if own is None else own.pid if own.poll() is None else 0
            if process and state_of(process) == "T":  # ranks that start there wait for it
                with suppress(OSError):
                    os.kill(process, signal.SIGCONT)
            if process or not self._folder.exists():
                continue
            delay = min(60.0, 2 * delay)  # one that cannot start is not tried all the time
            (self._folder / SOCKET).unlink(missing_ok=True)
            self._start()

    def _start(self) -> None:
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", _NVML_CHECK: "1"}
        paths = str(self._folder / SOCKET), str(self._folder / LOCK)
        call = [sys.executable, "-m", "autovaruna.elastic.standby", *paths, *self._libraries]
        with open(self._folder / "standby.log", "wb") as log:
            self._process = subprocess.Popen(
                call, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


def _listener(path: Path) -> int:
    """Returns the process that listens at a socket; 0: none does."""
    try:
        with socket.socket(socket.AF_UNIX) as tried:
            tried.connect(str(path))
            process, _, _ = _PEER.unpack(tried.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            return int(process)
    except OSError:
        return 0


class QuickEnd:
    """Ends this process, with `status`, once all else at its end is done, without taking the interpreter apart.

    That takes as long as a start. Made before anything else asks to be called at the end, it comes last. With no status
    the process ends as Python does.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        if self.status is not None:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            ctypes.CDLL(None).fflush(None)
            os._exit(self.status)


def main() -> None:
    """Is the process: ``python -m autovaruna.elastic.standby SOCKET KEEPER_LOCK [LIBRARY...]``."""
    path, lock = map(Path, sys.argv[1:3])
    end = QuickEnd()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    warm(sys.argv[3:])
    serve(path, lock)
    if (place := job_place()) is not None:
        with suppress(OSError):  # where memory is full, which the script hears of
            Reporter(place.of_rank(int(os.environ["OMPI_COMM_WORLD_RANK"])))  # so that it is known if it is stopped
    try:
        rank_script.main()
        end.status = 0
    except SystemExit as left:
        end.status = (left.code or 0) & 0xFF if isinstance(left.code, int | None) else None
        raise


if __name__ == "__main__":
    main()
