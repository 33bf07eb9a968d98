"""Keeps workers of a DataLoader while their rank ends at a step's border: a signal may reach them as well."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from autovaruna._torch import WORKER_LOOP, run_worker, workers
from autovaruna.interception.installed import Undo, put

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a rank to end."""


def keep_workers() -> Undo:
    """Has workers that start from now on hear such signals from their rank alone, with which they end."""
    return put(workers, WORKER_LOOP, _run_worker)


def _run_worker(*args: Any) -> None:
    """Runs a worker, forked or spawned: one of its threads takes the signals, for it alone sees who has sent them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_await_rank, args=(os.getppid(),), daemon=True).start()
    run_worker(*args)


def _await_rank(rank: int) -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != rank:
        pass
    os._exit(0)
