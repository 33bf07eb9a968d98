"""Is the command line: ``autovaruna COMMAND`` or ``python -m autovaruna COMMAND``; finds the module of each command."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from autovaruna.commands.printing import hush
from autovaruna.errors import AutoVarunaError

_COMMANDS = {
    "run": "run_varuna",
    "notify": "elastic.notices",
    **{name: f"commands.{name}" for name in ("config", "show", "measure", "plan", "simulate", "trace", "report")},
}
"""The module of each command: it has the command's ``HELP``, `add_options` and `run`."""

_RARELY = 10_000_000, 50, 100
_INTERRUPTED = 128 + 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 1 after an error that the user can put right, 130 after Ctrl-C.

    That of ``run`` is the job's.
    """
    options = parser_of(sys.argv[1:] if arguments is None else arguments).parse_args(arguments)
    try:
        status = _module(options.command).run(options)
    except AutoVarunaError as error:
        sys.stderr.write(f"autovaruna: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("autovaruna: interrupted\n")
        return _INTERRUPTED
    return status or 0


def parser_of(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Returns a parser of the command that comes first; of all, if none does.

    Most commands import torch, which takes seconds and memory; those that live long or run often do not.
    """
    parser = argparse.ArgumentParser(prog="autovaruna", description="Plans, measures, and shows both.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in arguments[:1] if arguments[:1] and arguments[0] in _COMMANDS else _COMMANDS:
        command = _module(name)
        command.add_options(commands.add_parser(name, help=command.HELP, description=command.run.__doc__))
    return parser


def _module(command: str) -> Any:
    return import_module(f"autovaruna.{_COMMANDS[command]}")


def collect_rarely() -> None:
    """Has garbage looked for rarely, in a process that does nothing but one command.

    A trace holds millions of objects; to go through them again and again takes a sixth of a plan's time.
    """
    gc.set_threshold(*_RARELY)


def main_of_process() -> int:
    """Runs the command as all that this process does: what it leaves is neither searched nor taken apart at the end."""
    collect_rarely()
    try:
        status = main()
    finally:
        gc.freeze()
        _print_what_is_left()
    if "mpi4py.MPI" not in sys.modules:  # which has to be finalised
        _end(status)
    return status


def _end(status: int) -> NoReturn:
    """Ends the process at once: to free the objects of a trace one by one takes as long as to save a plan."""
    atexit._run_exitfuncs()
    _print_what_is_left()
    if sys.stderr is not None:
        sys.stderr.flush()
    os._exit(status)


def _print_what_is_left() -> None:
    """Prints what waits to be printed, as the help does, unless nobody listens any more."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        hush()


if __name__ == "__main__":
    sys.exit(main_of_process())
