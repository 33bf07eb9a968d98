"""Stands between mpirun and a rank: has a rank made, passes signals on, and tells the launcher how the rank ended.

mpirun starts ``python -S -E stub.py``, which imports next to nothing. The rank is forked by the host's standby process,
which has everything imported, where there is one; else Python is started. mpirun itself blames a rank that did nothing
when one on another host is killed, and says that a job has ended well whose host is lost: the line tells the truth.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from contextlib import suppress

ENDED = "\x1eended "  # begins the line by which the launcher learns a rank and its status; it shows no such line
SOCKET = "VARUNA_STANDBY"  # the variable that names the standby process's socket
_SET_DEATH_SIGNAL = 1  # of prctl, on Linux
_PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGVTALRM, signal.SIGURG)


def main() -> None:
    """Runs a rank and ends as it ends."""
    connection = _standby(os.environ.get(SOCKET, ""))
    status = _forked(connection) if connection is not None else _started()
    sys.stderr.write(f"{ENDED}{os.environ['PMIX_RANK']} {status}\n")
    sys.stderr.flush()
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _standby(path: str) -> "socket.socket | None":
    """Returns a connection to the standby process, which has got this process's variables and files; None: no such."""
    if not path:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        job = json.dumps({"variables": dict(os.environ), "folder": os.getcwd()}).encode()
        socket.send_fds(connection, [len(job).to_bytes(8, "little")], [0, 1, 2])
        connection.sendall(job)
        return connection
    except OSError:
        connection.close()
        return None


def _forked(connection: socket.socket) -> int:
    """Returns how a rank ends that the standby process forks; it is killed if this process or that one ends."""
    lines = connection.makefile()
    first = lines.readline()
    if not first:  # the standby process has ended before it forked
        return _started()
    process = int(first)
    _pass_on(process)
    last = lines.readline()
    if last:
        return int(last)
    with suppress(OSError):
        os.kill(process, signal.SIGKILL)
    return -signal.SIGKILL


def _started() -> int:
    """Returns how a rank ends that is started here."""
    stub = os.getpid()
    process = os.fork()
    if process == 0:
        os.setpgid(0, 0)  # mpirun signals the whole group: each signal would come twice
        end_with_parent(signal.SIGKILL)
        if os.getppid() != stub:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank_script.py")
        os.execv(sys.executable, [sys.executable, script])
    _pass_on(process)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def end_with_parent(number: int) -> None:
    """Has this process get a signal when the one that has started it ends."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, number)


def _pass_on(process: int) -> None:
    """Passes signals on to a process from now on."""
    for number in _PASSED:
        signal.signal(number, lambda number, _: os.kill(process, number))


if __name__ == "__main__":
    main()
