"""Reads the allocation that this process is in, of Slurm, PBS or LSF, and asks Slurm to put its job into the queue."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from autovaruna.errors import ConfigError

_JOB, _NODES, _TASKS = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"
_SECONDS = 30.0


def allocated_lines(num_slots: int | None, variables: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the hosts of the allocation, each as often as it is to have ranks; none: this is no allocation."""
    if names := slurm_nodes(variables):
        text = variables.get(_TASKS, "")
        counts = [1] * len(names) if num_slots else _counts(text)
        if len(counts) != len(names):  # as in a step of some of the job's nodes
            raise ConfigError(f"{_TASKS} is {text!r} for {len(names)} nodes of Slurm; pass --ranks_per_host")
        listed = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    elif file := variables.get("PBS_NODEFILE"):
        try:
            listed = Path(file).read_text(encoding="utf-8").split()
        except OSError as error:
            raise ConfigError(f"PBS_NODEFILE {file} cannot be read: {error.strerror}; pass --machine_list") from None
    else:
        listed = variables.get("LSB_HOSTS", "").split()
    return [name for name in dict.fromkeys(listed) for _ in range(num_slots)] if num_slots else listed


def slurm_nodes(variables: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the names of the nodes of Slurm's allocation; none: this is none."""
    nodes = variables.get(_NODES, "")
    return _names_of(nodes) if nodes and _JOB in variables else ()


def check_requeue(variables: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError where no job of Slurm could be put into its queue again."""
    if _JOB not in variables:
        raise ConfigError(f"--requeue asks Slurm, but {_JOB} is not set; expected to run in a batch job of Slurm")


def requeue(variables: Mapping[str, str] = os.environ) -> None:
    """Has Slurm put this job into its queue again, and end what is left of it now."""
    _scontrol("requeue", variables[_JOB])


@cache
def _names_of(nodes: str) -> tuple[str, ...]:
    return tuple(_scontrol("show", "hostnames", nodes).split())


def _counts(text: str) -> list[int]:
    """Returns the numbers in Slurm's form: 4, 4, 1 of ``4(x2),1``."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]


def _scontrol(*words: str) -> str:
    command = " ".join(("scontrol", *words))
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"`{command}` cannot be run ({error}); expected Slurm's scontrol on PATH") from None
    if done.returncode:
        raise ConfigError(f"`{command}` ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout
