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
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
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


def serve(address: str) -> Job:
    """Prepares what ranks are to have, and forks one for each stand-in that asks; returns in the process of a rank."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        os.rename(f"{address}.new", address)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            asker = listener.accept()[0]
            words, files, _, _ = socket.recv_fds(asker, MOST_BYTES, 3)
            job: Job = json.loads(words)
            with asker:
                if "prepare" in job:
                    module, _, function = job["prepare"].partition(":")
                    getattr(importlib.import_module(module), function)(*job["args"])
                    spare_collector()
                    asker.send(b"1")
                elif is_rank(asker, files):
                    return job
            for file in files:
                os.close(file)
    os._exit(0)


def is_rank(stand_in: socket.socket, files: list[int]) -> bool:
    """Forks a rank, and a process between that ends it with its stand-in, or with the server; says who this is."""
    if os.fork():
        return False
    rank = os.fork()
    if rank == 0:
        for place, file in enumerate(files):
            os.dup2(file, place)
            os.close(file)
        return True
    for file in files:
        os.close(file)
    end = os.pidfd_open(rank)
    if end not in select.select([end, stand_in, sys.stdin], [], [])[0]:
        os.kill(rank, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    with suppress(OSError):  # the stand-in has ended
        stand_in.send(str(status).encode())
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
    job = serve(sys.argv[1])
    os.environ.clear()
    os.environ.update(job["variables"])
    os.chdir(job["folder"])
    sys.argv = list(job["words"])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
