"""What a user asks of the manager is read, or refused in words that say what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autovaruna.elastic.options import Options, list_hosts, read_options, read_variables
from autovaruna.errors import ConfigError


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("machines").write_text("one\ntwo  # the second\n\n")
    Path("train.py").write_text("")


def options(*words: str) -> Options:
    """Returns what a command line asks for."""
    return read_options(["--machine_list", "machines", *words, "train.py"])


def test_a_job_has_a_manager_unless_it_is_to_run_once() -> None:
    found = options("--ranks_per_host", "2", "--max_restarts", "7", "--events", "log", "--no_standby")
    assert found.hosts == {"one": 2, "two": 2} and found.morphing is not None
    assert (found.morphing.max_restarts, found.morphing.has_standby, found.morphing.min_ranks) == (7, False, 1)
    assert found.morphing.events is not None and Path(found.morphing.events).name == "log"
    assert options("--no_morphing").morphing is None


def test_stages_that_are_asked_for_need_as_many_ranks() -> None:
    found = options("--nstages", "5", "--min_ranks", "2").morphing
    assert found is not None and found.min_ranks == 5


@pytest.mark.parametrize("name", ["--min_ranks", "--ranks_per_host", "--nstages"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is 0; expected 1 or more"):
        options(name, "0")


@pytest.mark.parametrize("name", ["--checkpoints", "--events"])
def test_what_could_not_be_written_later_is_refused_now(name: str) -> None:
    options(name, "new/folder/there")
    with pytest.raises(ConfigError, match=f"{name} is train.py/there.*, which cannot be written"):
        options(name, "train.py/there")


def test_a_command_may_list_the_hosts() -> None:
    assert list_hosts(None, 3, "printf 'a\\nb # x\\na\\n'") == {"a": 6, "b": 3}
    with pytest.raises(ConfigError, match=r"ended with status 3: no such cloud; expected a machine a line"):
        list_hosts(None, 1, "echo no such cloud >&2; exit 3")
    with pytest.raises(ConfigError, match="lists no machine"):
        list_hosts(None, 1, "true")


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "a b", "a;b", "$(touch x)", "@a", "-x", "a:2"])
def test_a_host_is_no_word_of_a_command(name: str) -> None:
    Path("machines").write_text(f"{name}\n")
    with pytest.raises(ConfigError, match=f"holds {re.escape(repr(name))}; expected one name or address a line"):
        options()


def test_without_a_list_the_job_has_this_machine_and_without_a_file_no_variables() -> None:
    assert list_hosts(None, 4, None) == {"localhost": 4} and read_variables(None) == {}
