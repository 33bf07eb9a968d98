"""Runs a script as one rank of a job that the launcher started; imports nothing but Python's own library.

Options that the launcher knows are put in front of the script's own arguments, for every option that a parser of the
script (``argparse``) has. Signals that mpirun keeps to itself come as others and are turned back.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

VARIABLE = "VARUNA_LAUNCH"
"""Holds what all ranks get, as JSON: the script and its arguments too, so that nothing reads them but the script."""
STARTED = "\x1estarted"  # tells the launcher that a rank runs; it shows no such line
SAVED = 75  # what a rank, or the job, ends with that can be started again from what it has saved (EX_TEMPFAIL)
HELD = 76  # what a rank ends with whose state is in memory of its host, and nowhere else yet
STAND_INS = {signal.SIGTERM: signal.SIGVTALRM, signal.SIGINT: signal.SIGURG}
"""What mpirun forwards in place of what it would end the job for."""


def options_of(launch: Mapping[str, Any], rank: int, local_rank: int) -> dict[str, str]:
    """Returns the launcher's options of one rank, by name, out of what it was started with."""
    grid: list[list[int]] | None = launch["grid"]
    found: dict[str, Any] = {"rank": rank, "local_rank": local_rank, "chunk_size": launch["chunk_size"] or 0}
    found["stage_to_rank_map"] = "auto" if grid is None else ";".join(",".join(map(str, ranks)) for ranks in grid)
    if launch["batch_size"] is not None:
        found["batch_size"] = _samples_of(launch["batch_size"], grid, rank)
    if launch["resume_step"] is not None:
        found["resume_step"] = launch["resume_step"]
    return {name: str(value) for name, value in found.items()}


def _samples_of(batch_size: int, grid: Sequence[Sequence[int]] | None, rank: int) -> int:
    """Returns the samples of a rank's replica; the first replicas have one more where the batch does not divide."""
    if grid is None:
        return batch_size
    replica = next(ranks.index(rank) for ranks in grid if rank in ranks)
    return batch_size // len(grid[0]) + (replica < batch_size % len(grid[0]))


def options_for(parser: argparse.ArgumentParser, options: Mapping[str, str]) -> list[str]:
    """Returns the options that a parser has, spelled as it spells them."""
    names = parser._option_string_actions
    spelled = {name: (f"--{name}", f"--{name.replace('_', '-')}") for name in options}
    known = {name: next((each for each in both if each in names), "") for name, both in spelled.items()}
    return [f"{known[name]}={value}" for name, value in options.items() if known[name]]


def give_options(options: Mapping[str, str]) -> None:
    """Puts the launcher's options in front of what each parser of the script, also of a subcommand, reads."""
    parse: Any = argparse.ArgumentParser.parse_known_args
    reading: list[argparse.ArgumentParser] = []

    def parse_with_options(self: argparse.ArgumentParser, args: Any = None, *more: Any, **named: Any) -> Any:
        if args is None or reading:
            args = [*options_for(self, options), *(sys.argv[1:] if args is None else args)]
            reading.append(self)
        try:
            return parse(self, args, *more, **named)
        finally:
            if reading and reading[-1] is self:
                reading.pop()

    argparse.ArgumentParser.parse_known_args = parse_with_options  # type: ignore[method-assign]


def _turn_back(number: int, frame: object) -> None:
    meant = next(each for each, stand_in in STAND_INS.items() if stand_in == number)
    os.kill(os.getpid(), meant)


def _end_early(number: int, frame: object) -> None:
    """Ends a rank that has made no step as one that may be started again, unless it hears signals by itself."""
    ending = sys.modules.get("autovaruna.interception.ending")
    if ending is None or not (ending.has_signal() or ending.has_trained):
        sys.exit(SAVED)
    if not ending.has_signal():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def main() -> None:
    """Runs the script with its arguments."""
    rank, local = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "LOCAL_RANK"))
    for stand_in in STAND_INS.values():
        signal.signal(stand_in, _turn_back)
    signal.signal(signal.SIGUSR1, _end_early)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # which the stub has blocked until here
    sys.stderr.write(STARTED + "\n")
    sys.stderr.flush()
    launch = json.loads(os.environ[VARIABLE])
    try:
        os.chdir(launch["code_dir"])
    except OSError as error:
        host = os.uname().nodename
        sys.exit(f"run_varuna: --code_dir {launch['code_dir']} cannot be used on {host}: {error.strerror}")
    give_options(options_of(launch, rank, local))
    sys.argv[:] = launch["arguments"]
    script = sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:  # as Python shows it that runs the script itself
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != script:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


if __name__ == "__main__":
    main()
