"""Holds the doctor: ten lines of what there is, and in each what is wrong and what to do."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autovaruna.__main__ import main
from autovaruna.commands import doctor

FAULT = "  WRONG: "


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> Any:
    """Returns a function that runs the doctor, and returns its status and lines by name; no rank is started."""
    monkeypatch.setenv("AUTOVARUNA_CONF_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "_mpi", lambda: doctor.Finding("is tried in another test"))
    monkeypatch.setattr(doctor, "_LEAST_SHARED", 0)
    monkeypatch.setattr(doctor, "_LEAST_DESCRIPTORS", 0)

    def run(*arguments: str) -> tuple[int, dict[str, str]]:
        status = main(["doctor", *arguments])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 10
        return status, {line[:14].strip(): line[15:] for line in lines}

    return run


def test_ten_lines_say_what_there_is(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    status, lines = found()
    assert status == 0 and not any(FAULT in line for line in lines.values())
    assert torch.__version__ in lines["torch"] and f"{len(os.sched_getaffinity(0))} of" in lines["cores"]
    assert lines["scheduler"] == "Slurm, n[1-2]"


def test_what_is_wrong_says_what_to_do(found: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "conf.toml").write_text("num_stage = 2")
    monkeypatch.setattr(doctor, "_LEAST_SHARED", 1 << 60)
    monkeypatch.setattr(doctor, "_LEAST_DESCRIPTORS", 1 << 60)
    monkeypatch.setattr(doctor, "SUPPORTED_TORCH", "torch>=1.0,<1.1")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    status, lines = found()
    cures = {"settings": "num_stages?", "torch": "pip install 'torch>=1.0,<1.1'"}
    cures |= {"shared memory": "--shm-size", "descriptors": "ulimit -n"}
    assert status == 1
    assert {name for name, line in lines.items() if FAULT in line} == cures.keys()
    assert all(cure in lines[name] for name, cure in cures.items())


def test_hosts_that_cannot_be_used_are_named(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three, one is this one, one has another torch, and one is not reached."""
    answers = {"old": [sys.executable, "-c", "print('0.0.1 1.0')"], "away": ["sh", "-c", "echo no route >&2; exit 255"]}
    monkeypatch.setattr(doctor, "over_ssh", lambda host, call: answers[host])
    status, lines = found("--hosts", "localhost,old,away")
    assert status == 1 and lines["hosts"].startswith("1 of 3 can be used" + FAULT)
    assert "old has autovaruna and torch 0.0.1 1.0" in lines["hosts"] and "away (no route)" in lines["hosts"]
    assert found("--hosts", "localhost")[0] == 0


def test_two_ranks_are_started_as_a_launcher_would(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "2 Open MPI v5\n2 Open MPI v5\n": "2 ranks joined",
        "1 MPICH\n1 MPICH\n": "built with another MPI",
        "": "two ranks cannot be started (no slots)",
    }
    assert not doctor._mpi().fault
    for output, expected in answers.items():
        done = subprocess.CompletedProcess([], int(not output), output, "no slots")
        monkeypatch.setattr(doctor, "_run", lambda call, variables, done=done: done)
        assert expected in " ".join(doctor._mpi())
