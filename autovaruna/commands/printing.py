"""Prints tables and texts to standard output."""

from __future__ import annotations

import os
import shutil
import sys
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from autovaruna.errors import InputError


class _Console(Console):
    """A console that leaves it to the caller what becomes of a closed pipe."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def show(content: Table | str) -> None:
    """Prints a table in the width of the terminal, or a text as it is; 160 columns where there is no terminal.

    Nothing where nobody listens any more, as behind ``| head -1``: files are still written.

    Raises:
        InputError: there is no room for it.
    """
    if sys.stdout is None:
        return
    try:
        if isinstance(content, str):
            sys.stdout.write(content + "\n")
        else:
            _Console(width=columns()).print(content)
        sys.stdout.flush()
    except BrokenPipeError:
        hush()
    except OSError as error:
        hush()
        raise InputError(f"Standard output cannot be written to: {error.strerror}. Expected a place for it.") from error


def columns() -> int:
    """Returns the width of the terminal; 160 where there is none."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else 160


def hush() -> None:
    """Lets all that is still to be printed go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
