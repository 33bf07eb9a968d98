"""Reads the command line of the launcher, and the variables that it names."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autovaruna.config.files import at_home, check_writable
from autovaruna.elastic.host_list import list_hosts, read_lines
from autovaruna.errors import ConfigError

DEFAULT_ENV_FILE = "varuna.env"
_ASSIGNS = re.compile(r"\s*(#|$|(export\s+)?['\"]?[^\W\d]\w*=)")


@dataclass(frozen=True)
class MorphingOptions:
    """How a job goes on when hosts come and go; what each setting means is said in `add_options`.

    Without a `machine_list` it has its allocation's hosts, or this machine; without `discover_hosts` the file counts.
    """

    machine_list: str | None
    gpus_per_node: int | None
    discover_hosts: str | None = None
    min_ranks: int = 1
    max_restarts: int = 30
    checkpoints: str | None = None
    checkpoint_seconds: float = 600.0
    state_wait_seconds: float = 30.0
    events: str | None = None
    slow_factor: float = 1.5
    memory: str = "/dev/shm"
    has_standby: bool = True
    start_seconds: float = 30.0
    keep_seconds: float = 60.0
    end_wait_seconds: float = 600.0
    job: str = ""
    forget_memory: bool = False
    insecure_copies: bool = False
    copy_share: float = 0.1


@dataclass(frozen=True)
class LaunchOptions:
    """What a user asked the launcher for; 0 and None: not said; without `morphing` the job runs once."""

    hosts: dict[str, int]
    batch_size: int | None
    num_stages: int
    chunk_size: int
    variables: dict[str, str]
    code_dir: Path
    script: str
    arguments: tuple[str, ...]
    profile_folder: str | None
    resume_step: int | None
    morphing: MorphingOptions | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks that there is room for."""
        return sum(self.hosts.values())


def read_options(arguments: Sequence[str] | None = None) -> LaunchOptions:
    """Returns the options of a command line, as Varuna's launcher has it; ConfigError if they cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m autovaruna.run_varuna",
        description="Starts a training script on every rank of the machines in a list.",
        allow_abbrev=False,
    )
    add_options(parser, "available_machines.out")
    return options_in(parser.parse_args(arguments))


def options_in(given: argparse.Namespace) -> LaunchOptions:
    """Returns the options of a command line that has been parsed; raises as `read_options`."""
    for name in ("gpus_per_node", "batch_size", "nstages", "chunk_size", "min_ranks"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; expected 1 or more")
    code_dir = Path(given.code_dir).absolute()
    if not code_dir.is_dir():
        raise ConfigError(f"--code_dir {given.code_dir} is no directory; expected the directory to run the script in")
    options = LaunchOptions(
        hosts=list_hosts(given.machine_list, given.gpus_per_node, given.discover_hosts),
        batch_size=given.batch_size,
        num_stages=given.nstages or 0,
        chunk_size=given.chunk_size or 0,
        variables=read_variables(given.env_file),
        code_dir=code_dir,
        script=_find_script(given.script, code_dir),
        arguments=tuple(given.arguments),
        profile_folder=given.profile_folder,
        resume_step=given.resume_step,
        morphing=None if given.no_morphing else _read_morphing(given),
    )
    if options.num_stages > options.num_ranks:
        raise ConfigError(
            f"--nstages is {options.num_stages}, but there are {options.num_ranks} ranks on {len(options.hosts)} "
            "machines, and a stage needs one of its own. Lower it, or raise --gpus_per_node"
        )
    return options


def _read_morphing(given: argparse.Namespace) -> MorphingOptions:
    values = {name: getattr(given, name) for name in MorphingOptions.__dataclass_fields__}
    values["min_ranks"] = max(given.min_ranks, given.nstages or 1)
    values["checkpoints"] = given.checkpoints and os.path.abspath(given.checkpoints)
    if given.checkpoints:
        check_writable("--checkpoints", Path(given.checkpoints, "step"))
    if not 0 < given.copy_share <= 1:
        raise ConfigError(f"--copy_share is {given.copy_share:g}; expected more than 0, and 1 at most")
    if given.events:
        check_writable("--events", given.events)
    return MorphingOptions(**values)


def add_options(parser: argparse.ArgumentParser, machine_list: str | None) -> None:
    """Adds the launcher's options; without a machine list, the allocation or this machine alone is the default."""
    add, add_path = parser.add_argument, partial(parser.add_argument, type=at_home)
    text = "a name a line; not given: the allocation, or this machine"
    add_path("--machine_list", default=machine_list, metavar="FILE", help=text)
    text = "ranks on each machine (as the allocation has tasks; without one 4)"
    add("--gpus_per_node", "--ranks_per_host", type=int, metavar="G", help=text)
    add("--batch_size", "--batch-size", type=int, metavar="B", help="samples of a step, over all ranks")
    add("--nstages", type=int, metavar="S", help="stages of the pipeline; not given: found")
    add("--chunk_size", "--chunk-size", type=int, metavar="C", help="most samples of a micro-batch; not given: found")
    add_path("--profile_folder", metavar="DIR", help="what a Profiler wrote; stages and micro-batch size follow")
    add_path("--env_file", metavar="FILE", help=f"variables of ranks, NAME=value; {DEFAULT_ENV_FILE} if it is there")
    add_path("--code_dir", default=".", metavar="DIR", help="directory to run in, the same on every machine")
    add("--resume_step", type=int, metavar="STEP", help="passed on to the script: the checkpoint to go on from")
    add("--no_morphing", action="store_true", help="run the job once, whatever becomes of it")
    add("--discover_hosts", metavar="COMMAND", help="prints the machine list; asked every few seconds")
    add("--min_ranks", type=int, default=1, metavar="N", help="with fewer, wait for hosts (1)")
    add("--max_restarts", type=int, default=30, metavar="N", help="most starts again within an hour (30)")
    add_path("--checkpoints", metavar="DIR", help="write what hosts have in memory there, from time to time")
    add("--checkpoint_seconds", type=float, default=600.0, metavar="S", help="how often (600)")
    add("--state_wait_seconds", type=float, default=30.0, metavar="S", help="wait for hosts with a newer state (30)")
    add_path("--events", metavar="FILE", help="gets a line of JSON for each event")
    add("--slow_factor", type=float, default=1.5, metavar="F", help="a host so many times slower is left out (1.5)")
    add_path("--memory_folder", dest="memory", default="/dev/shm", metavar="DIR", help="in a host's memory (/dev/shm)")
    add("--start_seconds", type=float, default=30.0, metavar="S", help="most that ranks take to start on a host (30)")
    add("--keep_seconds", type=float, default=60.0, metavar="S", help="hosts keep states without a manager (60)")
    add("--end_wait_seconds", type=float, default=600.0, metavar="S", help="most to wait for the last checkpoint (600)")
    add("--job", default="", metavar="NAME", help="another job for each name, though script and arguments are the same")
    add("--forget_memory", action="store_true", help="begin without what a killed run has left in memory of hosts")
    add("--insecure_copies", action="store_true", help="copies between hosts go as they are, for trusted networks")
    add("--copy_share", type=float, default=0.1, metavar="F", help="of a link, for copies between hosts (0.1)")
    add("--no_standby", dest="has_standby", action="store_false", help="start Python anew for each rank")
    add("script", help="the training script, in code_dir")
    add("arguments", nargs=argparse.REMAINDER, help="its own arguments")


def read_variables(path: str | None) -> dict[str, str]:
    """Returns the variables of an environment file; raises ConfigError if it has a line that is no ``NAME=value``."""
    if path is None and not Path(DEFAULT_ENV_FILE).is_file():
        return {}
    file = path or DEFAULT_ENV_FILE
    lines = read_lines(file, "--env_file", "lines NAME=value")
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        try:
            if not _ASSIGNS.match(line):  # quickly, where a line is long
                raise ValueError
            words = shlex.split(line, comments=True)
            words = words[1:] if words[:1] == ["export"] else words
            pairs = dict(word.split("=", 1) for word in words)
            if not all(name.isidentifier() for name in pairs):
                raise ValueError
        except ValueError:
            raise ConfigError(f"--env_file {file}, line {number}: {line!r:.80}; expected NAME=value") from None
        found |= pairs
    return found


def _find_script(name: str, code_dir: Path) -> str:
    """Returns the script's path: in code_dir, else from where the launcher runs."""
    for path in (code_dir / name, Path(name).absolute()):
        if path.is_file():
            return str(path)
    raise ConfigError(f"there is no script {name} in {code_dir}; expected a Python file")
