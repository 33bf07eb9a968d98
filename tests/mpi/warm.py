"""Forks ranks from a process that has imported all that they need, which takes a rank seconds.

``python -m tests.mpi.warm address`` serves until its standard input ends. What mpirun starts is a stand-in
(`stand_in.py`) for each rank: a rank dies with its stand-in, and the stand-in ends as its rank has ended. Such ranks
have one seed of hashes, and do not see what launched them.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autovaruna.api  # noqa: F401  as ranks do
from tests.collector import look_for_a_moment, spare_collector
from tests.mpi.launch import QUIET, ROOT

MOST_BYTES = 1 << 20
Job = dict[str, Any]


class Warm:
    """The server, seen from the tests."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory()
        self._address = Path(self._place.name) / "address"
        command = [sys.executable, "-m", "tests.mpi.warm", str(self._address)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **QUIET, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}, stdin=subprocess.PIPE
        )
        while not self._address.exists():
            assert self._process.poll() is None, "the server has ended"
            time.sleep(0.05)

    def words(self, module: str) -> list[str]:
        """Returns what mpirun is to start in place of a module."""
        stand_in = Path(__file__).with_name("stand_in.py")
        return [sys.executable, "-I", "-S", str(stand_in), str(self._address), module]

    def prepare(self, target: str, *args: Any) -> None:
        """Has the server run ``module:function`` itself: what that leaves in memory, later ranks have."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(str(self._address))
            socket.send_fds(server, [json.dumps({"prepare": target, "args": args}).encode()], [0, 1, 2])
            assert server.recv(1), f"{target} has failed"

    def end(self) -> None:
        """Ends the server, and all that it has forked."""
        self._process.communicate()
        self._place.cleanup()


class Server:
    """Forks a rank for each stand-in that asks for one; prepares what further ranks are to have."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.PollSelector()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"{address}.new")
        self._socket.listen(64)
        os.rename(f"{address}.new", address)
        self._stand_ins: dict[int, tuple[int, socket.socket]] = {}  # by rank's process: a file of it, its stand-in

    def serve(self) -> Job:
        self._selector.register(self._socket, selectors.EVENT_READ, self._answer)
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._end)
        while True:
            for key, _ in self._selector.select():
                job: Job | None = key.data()
                if job is not None:
                    return job

    def _answer(self) -> Job | None:
        asker, _ = self._socket.accept()
        words, files, _, _ = socket.recv_fds(asker, MOST_BYTES, 3)
        job: Job = json.loads(words)
        try:
            return self._prepare(asker, job) if "prepare" in job else self._fork(asker, job, files)
        finally:
            for file in files:
                os.close(file)

    def _prepare(self, asker: socket.socket, job: Job) -> None:
        with asker:
            module, _, function = job["prepare"].partition(":")
            getattr(importlib.import_module(module), function)(*job["args"])
            spare_collector()
            asker.send(b"1")

    def _fork(self, stand_in: socket.socket, job: Job, files: list[int]) -> Job | None:
        process = os.fork()
        if process == 0:
            return self._be_rank(stand_in, job, files)
        rank = os.pidfd_open(process)
        self._stand_ins[process] = rank, stand_in
        self._selector.register(rank, selectors.EVENT_READ, lambda: self._rank_has_ended(process))
        self._selector.register(stand_in, selectors.EVENT_READ, lambda: self._kill(process))
        return None

    def _be_rank(self, stand_in: socket.socket, job: Job, files: list[int]) -> Job:
        for rank, other in self._stand_ins.values():
            os.close(rank)
            other.close()
        stand_in.close()
        self._socket.close()
        for place, file in enumerate(files):
            os.dup2(file, place)
        return job

    def _rank_has_ended(self, process: int) -> None:
        rank, stand_in = self._stand_ins.pop(process)
        self._selector.unregister(rank)
        self._selector.unregister(stand_in)
        os.close(rank)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with stand_in:
            try:
                stand_in.send(str(status).encode())
            except OSError:  # it has ended
                return

    def _kill(self, process: int) -> None:
        if process in self._stand_ins:  # both may have ended at once
            os.kill(process, signal.SIGKILL)

    def _end(self) -> None:
        for process in self._stand_ins:
            self._kill(process)
        os._exit(0)


def import_what_comes_later() -> None:
    """Does what makes torch import more: half of the seconds."""
    layer = nn.Linear(1, 1)
    torch.optim.SGD(layer.parameters(), lr=0.1)
    torch.export.export(layer, (torch.ones(2, 1),))


if __name__ == "__main__":
    import_what_comes_later()
    look_for_a_moment()
    spare_collector()  # else each rank goes over all of it as it ends, for more than a second
    job = Server(sys.argv[1]).serve()
    os.environ.clear()
    os.environ.update(job["variables"])
    os.chdir(job["folder"])
    sys.argv = list(job["words"])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
