"""Defines `SingleWorld`: one process without mpirun. It starts no MPI; messages to itself work as everywhere."""

from __future__ import annotations

import sys
import traceback
from typing import NoReturn

from autovaruna.runtime.worlds.in_process import InProcessWorld, Mailboxes
from autovaruna.runtime.worlds.world import status_after


class SingleWorld(InProcessWorld):
    """The only rank."""

    def __init__(self) -> None:
        super().__init__(0, 1, Mailboxes(1))

    def abort(self, error: BaseException, where: str) -> NoReturn:
        """Prints the traceback, headed by `where`, and ends the program with `status_after`."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        sys.stderr.write(f"{where}:\n{trace}")
        sys.exit(status_after(error))
