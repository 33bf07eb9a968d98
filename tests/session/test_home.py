"""Paths that a script, or an option as ``--profile=~/file``, gives may begin with ``~``; a shell leaves these alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from autovaruna import AutoVaruna, load_checkpoint
from autovaruna.elastic.options import read_options
from autovaruna.profiler.cache import load_measured, save_measured
from autovaruna.profiler.records import BlockCost, Profile
from autovaruna.varuna.profiler import ProfileFolder


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's directory, which is not the one that the test runs in."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_are_there(background: bool, home: Path, tmp_path: Path) -> None:
    (home / "local").mkdir()
    model = AutoVaruna(nn.Linear(2, 2))
    model.save_checkpoint("~/saved", step=3, tempdir="~/local", background=background)
    model.wait_checkpoint()
    assert [each.name for each in (home / "saved").iterdir() if each.is_dir()] == ["step-00000003"]
    assert model.load_checkpoint("~/saved").step == load_checkpoint("~/saved", nn.Linear(2, 2)).step == 3
    assert not list((tmp_path / "here").iterdir())


def test_profiles_and_the_launcher_s_files_are_there(home: Path) -> None:
    profile = Profile("graph", "cpu", (1,), ((BlockCost(1.0, 2.0, 3.0, 4.0),),))
    save_measured("~/profile.json", profile)
    assert (home / "profile.json").is_file() and load_measured("~/profile.json", Profile) == profile
    assert ProfileFolder("~/folder").path == home / "folder"
    for name, text in (("machines", "localhost"), ("env", "COLOUR=blue"), ("job.py", "")):
        (home / name).write_text(text)
    options = read_options(["--machine_list=~/machines", "--env_file=~/env", "--code_dir=~", "job.py"])
    assert options.variables == {"COLOUR": "blue"} and options.script == str(home / "job.py")
