"""Holds the command line."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import autovaruna
from autovaruna.__main__ import main, parser_of
from autovaruna.config.settings import declarations
from autovaruna.planner.deployment import Fingerprint, deployment_of, save
from autovaruna.planner.search import make_plan
from tests.planner.cases import make_problem


@pytest.fixture(autouse=True)
def conf(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOVARUNA_CONF_DIR", str(tmp_path))
    return tmp_path / "conf.toml"


def row_of(text, name):
    return next(line for line in text.splitlines() if f" {name} " in line)


def test_config_prints_each_value_and_where_it_came_from(capsys, monkeypatch):
    monkeypatch.setenv("AUTOVARUNA_NSTAGES", "3")
    assert main(["config"]) == 0
    printed = capsys.readouterr().out
    assert "variable AUTOVARUNA_NSTAGES" in row_of(printed, "num_stages")
    assert "default" in row_of(printed, "num_replicas")
    assert all(row_of(printed, each.name) for each in declarations())
    assert main(["config", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert list(record) == [each.name for each in declarations()]
    assert record["num_stages"] | {"meaning": ""} == {"value": 3, "from": "variable AUTOVARUNA_NSTAGES", "meaning": ""}


def test_a_wrong_conf_file_ends_with_its_message(capsys, conf):
    conf.write_text("num_stage = 2")
    assert main(["config"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"autovaruna: {conf}: num_stage: ")
    assert "num_stages?" in error


def test_show_prints_each_stage_of_a_deployment(capsys, tmp_path):
    problem, file = make_problem(8, 3, 12, num_stages=3), tmp_path / "deployment.json"
    deployment = deployment_of(make_plan(problem), problem.graph, Fingerprint("abc", num_ranks=3, device="cpu"))
    save(file, deployment)
    assert main(["show", str(file)]) == 0
    printed = capsys.readouterr().out
    assert all(cut in printed for cut in deployment.cuts)
    assert f"{deployment.plan.num_micro_batches} micro-batches" in printed
    assert "3 ranks, cpu" in printed
    assert main(["show", "--json", str(file)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [each["starts_at"] for each in record["stages"]] == ["", *deployment.cuts]
    assert record["predicted_seconds"] == deployment.plan.predicted_seconds and record["valid_for"]["num_ranks"] == 3


def test_a_command_that_needs_no_torch_does_not_import_it():
    parsers = "; ".join(f"it.parser_of(['{command}'])" for command in ("run", "notify", "show", "--help"))
    code = f"import autovaruna.__main__ as it, sys; {parsers}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_the_installed_command_is_the_same_program(tmp_path, conf):
    """An installation has it beside its Python; it ends as ``python -m autovaruna`` does."""
    entry = re.search(r'"autovaruna = (.+):(.+)"', (Path(__file__).parents[1] / "setup.py").read_text())
    script = f"import sys; from {entry[1]} import {entry[2]}; sys.exit({entry[2]}())"
    for arguments in (["show", str(tmp_path / "nothing.json")], ["--help"]):
        starts = [sys.executable, "-c", script], [sys.executable, "-m", "autovaruna"]
        runs = [subprocess.run([*start, *arguments], capture_output=True, text=True, timeout=60) for start in starts]
        installed, module = ((each.returncode, each.stdout, each.stderr) for each in runs)
        assert installed == module


COMMANDS = ("run", "notify", "config", "show", "measure", "plan", "simulate", "trace", "doctor", "report")


def printed(capsys, *arguments):
    """Returns what a call prints that ends in the parser."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert not ended.value.code
    return capsys.readouterr().out


def test_help_names_each_command(capsys):
    text = printed(capsys, "--help")
    assert all(re.search(rf"^    {name}\b", text, re.MULTILINE) for name in COMMANDS)
    assert printed(capsys, "--version") == f"autovaruna {autovaruna.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_says_what_it_does_with_one_example_that_parses(capsys, command):
    text = printed(capsys, command, "--help")
    example = text.rpartition("\nexample: ")[2]
    assert text.count("example: ") == 1 and f"autovaruna {command}" in example
    words = shlex.split(example.partition(">")[0])
    words = words[words.index("autovaruna") + 1 :]
    assert parser_of(words).parse_args(words).command == command


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete_commands_and_options(shell):
    call = [sys.executable, "-m", "shtab", "autovaruna.__main__.parser_of", "--shell", shell]
    script = subprocess.run(call, capture_output=True, text=True, timeout=60).stdout
    assert all(word in script for word in (*COMMANDS, "ranks-per-host", "machine_list"))
    if shell == "bash":
        line = 'COMP_WORDS=(autovaruna plan --ranks-p); COMP_CWORD=2; _shtab_autovaruna; echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == ["--ranks-per-host"], done.stderr
