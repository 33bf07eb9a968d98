"""Stands in for a rank under mpirun: has `tests.mpi.warm` fork the rank, and ends as the rank ends.

``python stand_in.py address module argument ...``; imports next to nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def stand_in(address: str, *words: str) -> int:
    """Hands over the files, the environment and the words of this process; returns the status of the rank."""
    job = {"words": words, "variables": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps(job).encode()], [0, 1, 2])
        return int(server.recv(100) or b"1")


if __name__ == "__main__":
    status = stand_in(*sys.argv[1:])
    if status < 0:
        if -status == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
