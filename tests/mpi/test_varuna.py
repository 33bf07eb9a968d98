"""The launcher with real ranks: a script in Varuna's style, stopped by SIGUSR1 and gone on with; statuses; signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.mpi.launch import QUIET, ROOT, find_mpirun, read_until, run_group

GPT = str(ROOT / "examples" / "varuna_gpt.py")
TIMEOUT = 500


def command(folder: Path, *words: str, machine: str = "localhost") -> list[str]:
    """Returns a call of the launcher from a folder."""
    find_mpirun()
    (folder / "machines").write_text(machine + "\n")
    return [
        *(sys.executable, "-m", "autovaruna.run_varuna", "--machine_list", str(folder / "machines")),
        *("--code_dir", str(folder), "--no_morphing", *words),
    ]


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = {"AUTOVARUNA_CONF_DIR": str(folder), "AUTOVARUNA_PROFILE_ITERATIONS": "1"}
    return {**os.environ, **QUIET, **settings, "PYTHONPATH": path}


def launch(folder: Path, *words: str, machine: str = "localhost") -> subprocess.CompletedProcess[str]:
    return run_group(command(folder, *words, machine=machine), TIMEOUT, environment(folder))


def steps(text: str) -> list[int]:
    """Returns the steps whose losses a run printed."""
    return list(map(int, re.findall(r"^\[0\] step (\d+): loss [\d.]+$", text, re.M)))


@contextmanager
def running(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a job; ends it with the context. It hears SIGHUP also where the tests, under nohup, do not."""
    process = subprocess.Popen(
        command(folder, *words), env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(TIMEOUT)


def test_a_run_that_sigusr1_stops_goes_on_on_other_ranks(tmp_path: Path) -> None:
    """The script holds each of its losses to plain PyTorch, also those after it has gone on."""
    with running(tmp_path, "--gpus_per_node", "2", "--batch_size", "10", "--nstages", "2", GPT) as process:
        text = read_until(process, "step 0:")  # early: the job must not end before it hears the signal
        process.send_signal(signal.SIGUSR1)
        rest, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, text + rest
    begun = steps(text + rest)
    words = ("--gpus_per_node", "1", "--batch_size", "10", "--nstages", "1", "--resume_step", str(max(begun) + 1))
    done = launch(tmp_path, *words, GPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(begun + steps(done.stdout)) == list(range(12))


SCRIPT = """
import argparse, os, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int)
parser.add_argument("--act", default="")
args = parser.parse_args()
def end(*_):
    print("asked to end", flush=True)
    open(f"asked-{args.rank}", "w").close()
    until = time.monotonic() + 20  # mpirun ends the others when the first rank has ended: each waits for the other
    while time.monotonic() < until and not os.path.exists(f"asked-{1 - args.rank}"):
        time.sleep(0.05)
    sys.exit(9)
signal.signal(signal.SIGTERM, end)
if args.act == "join":
    import autovaruna
    autovaruna.barrier()
print("up as", args.rank, os.environ.get("COLOUR"), os.getcwd(), flush=True)
if args.act == "exit" and args.rank == 1:
    sys.exit(5)
if args.act == "kill" and args.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if args.act:
    time.sleep(60)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    """The name of a script in the code directory."""
    (tmp_path / "job.py").write_text(SCRIPT)
    return "job.py"


def test_ranks_run_in_the_directory_with_the_variables_on_a_machine_by_its_name(tmp_path: Path, script: str) -> None:
    (tmp_path / "env").write_text("COLOUR=blue\n")
    words = ("--gpus_per_node", "2", "--env_file", str(tmp_path / "env"), script)
    done = launch(tmp_path, *words, machine=socket.gethostname())
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] up as {rank} blue {tmp_path}" for rank in range(2)]


def test_arguments_reach_the_script_as_they_are(tmp_path: Path) -> None:
    """Once, mpirun took a lone colon for the start of another program, and ran what followed it."""
    (tmp_path / "job.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    given = ["a", ":", "-np", "1", "touch", str(tmp_path / "made"), "", "b c", "%p", "$HOME", "é\n;`", "--", "x" * 9000]
    done = launch(tmp_path, "--gpus_per_node", "1", "job.py", *given)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.removeprefix("[0] ")) == given and not (tmp_path / "made").exists()


@pytest.mark.parametrize(("act", "status"), [("exit", 5), ("kill", 128 + 9)])
def test_the_status_is_the_job_s(act: str, status: int, tmp_path: Path, script: str) -> None:
    assert launch(tmp_path, "--gpus_per_node", "2", script, "--act", act).returncode == status


ENDS: dict[tuple[str, signal.Signals], tuple[int, int]] = {
    ("wait", signal.SIGTERM): (9, 2),
    ("wait", signal.SIGHUP): (9, 2),
    ("wait", signal.SIGKILL): (-signal.SIGKILL, 0),
    ("wait", signal.SIGINT): (128 + signal.SIGINT, 0),
    ("join", signal.SIGINT): (128 + signal.SIGINT, 0),
}
"""The status of the launcher after a signal, and how many ranks were asked to end; by Ctrl-C all are interrupted."""


@pytest.mark.parametrize(("act", "number"), ENDS)
def test_a_signal_to_the_launcher_ends_every_rank(
    act: str, number: signal.Signals, tmp_path: Path, script: str
) -> None:
    """Once, ranks went on when a terminal was closed, and Ctrl-C ended those that had joined with status 1."""
    status, num_asked = ENDS[act, number]
    with running(tmp_path, "--gpus_per_node", "2", script, "--act", act) as process:
        read_until(process, "up as", 2)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=30)  # ends when nobody has the pipe open any more
    assert process.returncode == status
    assert "KeyboardInterrupt" in rest if number == signal.SIGINT else rest.count("asked to end") == num_asked


def test_a_machine_that_cannot_be_reached_is_named(tmp_path: Path, script: str) -> None:
    done = launch(tmp_path, "--gpus_per_node", "1", script, machine="no.such.machine.invalid")
    assert done.returncode != 0 and "no rank has started" in done.stderr and "no.such.machine.invalid" in done.stderr
