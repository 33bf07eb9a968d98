"""Is the command line: ``autovaruna COMMAND`` or ``python -m autovaruna COMMAND``; finds the module of each command."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from inspect import cleandoc
from typing import Any, NoReturn

from autovaruna import __version__
from autovaruna.commands.printing import hush
from autovaruna.errors import AutoVarunaError

_COMMANDS = {
    "run": ("run_varuna", "run a training script, and go on when hosts come and go"),
    "notify": ("elastic.notices", "tell running jobs that a host will be taken away"),
    "config": ("commands.config", "print each setting, its value, and where the value came from"),
    "show": ("commands.show", "print a saved deployment as a table"),
    "measure": ("commands.measure", "measure a model on this machine, block by block, and save the profile"),
    "plan": ("commands.plan", "plan a model for any number of ranks, none of which has to be there"),
    "simulate": ("commands.simulate", "replay a trace of hosts that come and go against a plan"),
    "trace": ("commands.trace", "show the trace of a run: steps as measured and as predicted"),
    "doctor": ("commands.doctor", "look at this machine and its environment, and say what is wrong and what to do"),
    "report": ("commands.report", "make one HTML file of a run: plan, steps, memory, loss, events, what to try next"),
}
"""The module of each command, with its ``EXAMPLE``, `add_options` and `run`; and what it does, in short."""
_DESCRIPTION = "Trains PyTorch models over many processes: runs jobs, plans and measures models, says what is wrong."
_EPILOG = "example: autovaruna plan examples/gpt3.py:build --ranks 64 --device h100"

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


def parser_of(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Returns a parser of all commands; of those that do not come first, if there are arguments, without the options.

    Most commands import torch, which takes seconds and memory; those that live long or run often do not.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("autovaruna", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"autovaruna {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in _COMMANDS.items():
        own = commands.add_parser(name, help=text, formatter_class=raw)
        if arguments is None or name in arguments[:1]:
            command = _module(name)
            own.description, own.epilog = cleandoc(command.run.__doc__), f"example: {command.EXAMPLE}"
            command.add_options(own)
    return parser


def _module(command: str) -> Any:
    return import_module(f"autovaruna.{_COMMANDS[command][0]}")


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
