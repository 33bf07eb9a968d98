"""Holds the plan command: without any rank it makes a plan, shows it, and saves what a run can load."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from autovaruna import AutoVaruna
from autovaruna.__main__ import main
from autovaruna.commands.plan import make_optimizer
from autovaruna.planner.deployment import load
from autovaruna.profiler.cache import load_measured
from autovaruna.profiler.optimizer_cost import state_factor
from autovaruna.profiler.records import Profile
from tests.commands import targets
from tests.products import some

HERE = "tests.commands.targets"
CPU_FILE = """
name = "cpu, 1 threads"
kind = "cpu"
memory = "8GiB"
[compute]
float32 = 5e10
[memory_bandwidth]
bytes_per_second = 1e10
[local_link]
bytes_per_second = 1e10
[remote_link]
bytes_per_second = 1e9
[all_reduce]
local_bytes_per_second = 5e9
remote_bytes_per_second = 1e9
"""


@pytest.fixture
def device(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(CPU_FILE)
    return str(path)


def plan(*arguments: str) -> int:
    return main(["plan", *arguments])


def test_a_plan_without_a_rank_is_shown_and_saved(tmp_path: Path, capsys: Any, device: str) -> None:
    output, picture = tmp_path / "plan.json", tmp_path / "step.png"
    arguments = ["--ranks", "8", "--ranks-per-host", "4", "--device", device, "--num-stages", "2"]
    assert plan(f"{HERE}:mlp_on_meta", *arguments, "-o", str(output), "--plot", str(picture)) == 0
    printed = capsys.readouterr()
    assert "2 stages" in printed.out and "(roofline)" in printed.out
    assert "predicted step" in printed.out and "\nbound " in printed.out
    assert "rank 0 |" in printed.out and "> forward" in printed.out
    assert "nothing was measured" in printed.out and not printed.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    deployment = load(output)
    assert not deployment.plan.is_measured and deployment.plan.num_stages == 2
    assert deployment.fingerprint.hosts == (4, 4) and deployment.fingerprint.device == "cpu, 1 threads"
    assert set(deployment.fingerprint.memory_bytes) == {8 * 2**30 * 0.9}
    assert main(["show", str(output)]) == 0
    assert "nothing was measured" in capsys.readouterr().out


def test_what_takes_hours_to_measure_has_to_be_asked_for(capsys: Any) -> None:
    assert plan(f"{HERE}:huge_on_meta", "--ranks", "2") == 1
    told = capsys.readouterr().err
    assert re.search(r"takes about [\d.]+ hours\. Expected 10 minutes at most: .*--device h100.*; --measure", told)


def test_json_and_a_profile_that_takes_the_place_of_the_prediction(tmp_path: Path, capsys: Any, device: str) -> None:
    file, output = str(tmp_path / "profile.json"), tmp_path / "plan.json"
    sizes = ["--micro-batch-sizes", "1,2", "--profile-iterations", "1"]
    assert main(["measure", f"{HERE}:mlp", "-o", file, *sizes, "--json"]) == 0
    record, profile = json.loads(capsys.readouterr().out), load_measured(file, Profile)
    assert record["micro_batch_sizes"] == [1, 2] and record["file"] == file
    assert record["costs"][1][0]["forward_seconds"] == profile.costs[1][0].forward_seconds
    assert plan(f"{HERE}:mlp", "--ranks", "2", "--device", device, "-o", str(output), "--table", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["num_micro_batches"] == load(output).plan.num_micro_batches and record["stages"][0]["blocks"]
    assert record["choices"] and "nothing was measured" in record["notes"][0]
    assert main(["measure", f"{HERE}:mlp", "-o", file, *sizes]) == 0
    profile = load_measured(file, Profile)
    assert profile.is_measured and profile.micro_batch_sizes == (1, 2) and capsys.readouterr().out
    assert plan(f"{HERE}:mlp", "--ranks", "2", "--device", device, "--profile", file, "-o", str(output)) == 0
    assert "roofline" not in capsys.readouterr().out
    assert load(output).plan.is_measured
    assert plan(f"{HERE}:mlp_on_meta", "--ranks", "2", "--device", device, "--profile", file) == 1
    assert "measure this model" in capsys.readouterr().err


def test_without_a_device_this_machine_is_measured_and_links_are_assumed(capsys: Any) -> None:
    assert plan(f"{HERE}:mlp", "--ranks", "2", "--profile-iterations", "1") == 0
    printed = capsys.readouterr().out
    assert "links are assumed" in printed and "roofline" not in printed


def test_a_run_loads_the_plan_that_was_made_without_it(tmp_path: Path, device: str, caplog: Any) -> None:
    """The device, the memory limit, the settings and the batch are those of the run."""
    output = tmp_path / "plan.json"
    more = ["--memory", "1GiB", "--optimizer", "sgd", "--num-micro-batches", "2", "--recompute", "all"]
    assert plan(f"{HERE}:mlp", "--ranks", "1", "--device", device, *more, "-o", str(output)) == 0
    model, args, kwargs = targets.mlp()
    settings: dict[str, Any] = {"deployment_file": str(output), "load_deployment": True, "memory_limit_bytes": "1GiB"}
    settings |= {"num_micro_batches": 2, "recompute": "all"}
    wrapped = AutoVaruna(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    with caplog.at_level("INFO"):
        wrapped(*args, **kwargs).backward()
    assert f"using the saved deployment {output}" in caplog.text


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing", "Expected MODULE:FUNCTION"),
        ("no.such.module:build", "cannot be imported: ModuleNotFoundError"),
        ("no/such/file.py:build", "does not exist"),
        (f"{HERE}:no_function", "has no function 'no_function'"),
        (f"{HERE}:not_a_function", "has no function 'not_a_function'"),
        (f"{HERE}:fails", "RuntimeError: no data here at"),
        (f"{HERE}:returns_a_model_alone", "returned (Mlp)"),
        (f"{HERE}:returns_other_things", "returned (int, int, int)"),
        (f"{HERE}:returns_no_samples", "a call of no samples"),
    ],
)
def test_what_cannot_be_planned_says_why(target: str, said: str, capsys: Any) -> None:
    for command in (["plan", target, "--ranks", "2"], ["measure", target]):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert said in error and "returns (model, args, kwargs)" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "0"], "--ranks is 0"),
        (["--ranks", "2", "--device", "h10"], "did you mean h100?"),
        (["--ranks", "2", "--num-stages", "two"], "--num-stages is 'two'; expected a whole number"),
        (["--ranks", "2", "--recompute", "some"], "expected one of"),
        (["--ranks", "2", "--memory", "much"], "--memory is 'much'; expected a number of bytes"),
        (["--ranks", "2", "--memory", "0"], "--memory is '0'; expected a number of bytes"),
        (["--ranks", "2", "--optimizer", "magic"], "expected none, "),
        (["--ranks", "2", "--optimizer", "sgd:speed=1"], "cannot be made"),
        (["--ranks", "2", "--profile", "/no/such/file"], "cannot be read"),
        (["--ranks", "2", "--num-stages", "3", "--max-stages-per-rank", "1", "--device", "h100"], "3 ranks are needed"),
        (["--ranks", "2", "--memory", "1KB", "--device", "h100"], "no plan fits into memory"),
    ],
)
def test_an_option_that_cannot_be_used_says_why(arguments: list[str], said: str, capsys: Any) -> None:
    assert plan(f"{HERE}:mlp", *arguments) == 1
    assert said in capsys.readouterr().err


def test_what_would_end_a_plan_late_is_told_before_the_model_is_built(tmp_path: Path, capsys: Any, device: str) -> None:
    """The function fails, but is never called."""
    without_memory = tmp_path / "small.toml"
    without_memory.write_text(Path(device).read_text().replace("memory = ", "# "))
    some = ["plan", f"{HERE}:fails", "--ranks", "2"]
    for arguments, said in (
        ([*some, "-o", str(tmp_path)], "--output is"),
        ([*some, "-o", "/proc/plan.json"], "cannot be written"),
        ([*some, "--plot", "/proc/step.png"], "cannot be written"),
        ([*some, "--plot", "step.xyz"], "ends in .xyz"),
        ([*some, "--plot", str(tmp_path / "none" / "step.png")], "no folder"),
        ([*some, "--device", str(without_memory)], "does not say its memory"),
        (["measure", f"{HERE}:fails", "-o", str(tmp_path)], "--output is"),
    ):
        assert main(arguments) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    some([["--num-stages", "2", "--schedule", "gpipe", "--memory-margin", "0.3"], [], ["--memory-margin", "0.3"]], 1),
)
def test_the_memory_that_is_said_to_be_enough_is(more: list[str], capsys: Any) -> None:
    """As the user says it: the part that is left free is on top, and no digit was rounded down."""
    arguments = [f"{HERE}:mlp", "--ranks", "2", "--device", "h100", *more]
    assert plan(*arguments, "--memory", "1KB") == 1
    found = re.search(r"give each rank ([0-9.]+ \w+) or more", capsys.readouterr().err)
    assert found is not None
    assert plan(*arguments, "--memory", found[1].removesuffix(" bytes")) == 0


def test_a_wrong_usage_ends_with_status_2() -> None:
    for arguments in (["plan"], ["plan", "x:y"], ["plan", "x:y", "--ranks", "many"], ["measure"], ["fly"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_without_matplotlib_a_picture_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert plan(f"{HERE}:mlp", "--ranks", "2", "--device", "h100", "--plot", "x.png") == 1
    assert "pip install 'autovaruna[plot]'" in capsys.readouterr().err


def test_a_file_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Its neighbours can be imported, as when it is run."""
    (tmp_path / "neighbour_of_build.py").write_text("from tests.commands.targets import mlp")
    (tmp_path / "my_build.py").write_text("from neighbour_of_build import mlp\n\ndef build():\n    return mlp()\n")
    monkeypatch.chdir("/")
    assert plan(f"{tmp_path / 'my_build.py'}:build", "--ranks", "2", "--device", "a100.toml") == 0
    assert "NVIDIA A100" in capsys.readouterr().out


def test_an_error_of_the_users_function_names_a_line_of_theirs(tmp_path: Path, capsys: Any, device: str) -> None:
    """Not one of a library, which raised it; and a script that ends itself is told like one that fails."""
    script = tmp_path / "their_build.py"
    script.write_text("import json, sys\ndef raises():\n    json.loads('{')\ndef ends():\n    sys.exit(3)\n")
    for name, said in (("raises", "JSONDecodeError"), ("ends", "SystemExit: 3")):
        assert plan(f"{script}:{name}", "--ranks", "2", "--device", device) == 1
        error = capsys.readouterr().err
        assert said in error and f"{script}:{3 if name == 'raises' else 5}" in error


def test_state_of_an_optimizer_counts_as_in_a_run() -> None:
    """To the bit, for a plan is valid for it: AdamW counts steps of each tensor, which are few bytes of a large one."""
    model, *_ = targets.mlp()
    own = make_optimizer("adamw", [*model.parameters()])
    assert own is not None
    assert state_factor(own) == state_factor(torch.optim.AdamW(model.parameters()))
    assert make_optimizer("muon", [*model.parameters()]) is not None


def test_the_table_lists_choices_fastest_first(capsys: Any, device: str) -> None:
    assert plan(f"{HERE}:mlp", "--ranks", "2", "--device", device, "--table") == 0
    rows = capsys.readouterr().out.partition("predicted")[0].splitlines()
    assert "choices, fastest first" in rows[0]
    assert {row.split()[0] for row in rows[3:] if row.split()} >= {"1", "2"}


def test_gpt3_is_planned_for_many_ranks(tmp_path: Path, capsys: Any) -> None:
    """Two layers of it: all of it is what the benchmark plans."""
    example = Path(__file__).parents[2] / "examples" / "gpt3.py"
    script = tmp_path / "small_gpt3.py"
    script.write_text(f"import sys\nsys.path.insert(0, {os.fspath(example.parent)!r})\nimport gpt3\n")
    script.write_text(script.read_text() + "\ndef build():\n    return gpt3.build(num_layers=2)\n")
    arguments = ["--ranks", "32", "--ranks-per-host", "8", "--device", "h100", "--batch-size", "32"]
    assert plan(f"{script}:build", *arguments) == 0
    assert "of 32 ranks are drawn" in capsys.readouterr().out
