"""Runs the placement benchmark on a workload of its own making, and its checker on splits that are wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "placement.py"


@pytest.fixture(scope="module")
def placement() -> Iterator[ModuleType]:
    sys.path.insert(0, str(_SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("placement", _SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(_SCRIPT.parent))


@pytest.fixture
def workload() -> dict[str, Any]:
    """A training step of three layers: nodes 1 to 3 forward, 4 to 6 backward, 7 a sum that nothing orders."""
    colours = {1: 1, 2: 2, 3: 3, 6: 1, 5: 2, 4: 3, 7: None}
    nodes = [
        {"id": i, "fpgaLatency": 2.0, "size": 4.0, "isBackwardNode": int(i > 3), "colorClass": colour}
        for i, colour in colours.items()
    ]
    pairs = [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (4, 7), (7, 6)]
    edges = [{"sourceId": a, "destId": b, "cost": 0.5, "size": 1.0} for a, b in pairs]
    return {"maxSizePerFPGA": 20.0, "maxFPGAs": 2, "nodes": nodes, "edges": edges}


def test_prints_and_writes_a_valid_split(
    placement: ModuleType, workload: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "three.json", tmp_path / "out.json"
    file.write_text(json.dumps(workload))
    assert placement.main([str(file), "--output", str(output)]) == 0
    line = capsys.readouterr().out.splitlines()[1].split()
    assert line[:5] == ["three", "2", "9.5", "9.5", "0.0000"]
    assert line[-1] == "valid"
    devices = json.loads(output.read_text())["three"]
    assert set(devices) == {str(i) for i in range(1, 8)}
    assert placement.check(workload, devices, 2, 9.5) == []


def test_devices_option_and_what_does_not_fit(
    placement: ModuleType, workload: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "three.json"
    file.write_text(json.dumps(workload))
    assert placement.main([str(file), "--devices", "1"]) == 1
    assert "8 bytes are missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"nodes": None}, "has nodes='None'; expected a list"),
        ({"maxFPGAs": "six"}, "has maxFPGAs='six'; expected a whole number"),
        ({"nodes": [{"id": 1, "size": 4.0}]}, "a node has no 'fpgaLatency'"),
        (
            {"nodes": [{"id": 1, "fpgaLatency": float("nan"), "size": 4.0}]},
            "fpgaLatency='nan'; expected a finite number",
        ),
        ({"nodes": [{"id": 1, "fpgaLatency": -1.0, "size": 4.0}], "edges": []}, "fpgaLatency='-1.0'; expected a fin"),
        ({"edges": [[1, 2]]}, "an edge is '[1, 2]'; expected an object"),
        ({"edges": [{"sourceId": 1, "destId": 99, "cost": 0.5}]}, "('1', '99') ends at an id that no node has"),
        ({"edges": [{"sourceId": a, "destId": b, "cost": 0.5} for a, b in ((1, 2), (2, 3), (3, 1))]}, "in a circle: "),
        ({"maxSizePerFPGA": 7.0}, "take 8 bytes and a device holds 7: 1 bytes are missing"),
        ({"maxFPGAs": 0}, "num_devices=0; expected at least 1"),
        ({"maxFPGAs": 2.5}, "maxFPGAs='2.5'; expected a whole number"),
        ({"maxSizePerFPGA": -1}, "maxSizePerFPGA='-1'; expected a finite number of 0 or more"),
        ({"nodes": [], "edges": []}, "has no nodes"),
        ({"nodes": [{"id": [1], "fpgaLatency": 1, "size": 1}], "edges": []}, "id='[1]'; expected a number or a text"),
        ({"edges": [{"sourceId": 1, "destId": 2, "cost": -1}]}, "cost='-1'; expected a finite number of 0 or more"),
        (
            {"nodes": [{"id": 1, "fpgaLatency": 1, "size": 30}, {"id": 2, "fpgaLatency": 1, "size": 30}], "edges": []},
            "take 30 bytes and a device holds 20: 10 bytes are missing; part them",
        ),
        (
            {"nodes": [{"id": i, "fpgaLatency": 1e308, "size": 1} for i in range(2)], "edges": []},
            "the seconds of all nodes together are no finite number",
        ),
    ],
)
def test_damaged_workloads_are_named_and_the_others_go_on(
    placement: ModuleType,
    workload: dict[str, Any],
    changed: dict[str, Any],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged, whole = tmp_path / "damaged.json", tmp_path / "whole.json"
    damaged.write_text(json.dumps(workload | {"maxFPGAs": 7} | changed))
    whole.write_text(json.dumps(workload))
    assert placement.main([str(damaged), str(whole)]) == 1
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert words in first
    assert second.endswith("valid")


def test_what_is_no_workload_at_all_is_named(
    placement: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.json").write_text('{"nodes": [')
    assert placement.main([str(tmp_path / "cut.json"), str(tmp_path / "none.json")]) == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 2 and all("cannot be read as JSON" in line for line in lines)


def test_more_devices_than_nodes_and_the_same_split_each_time(
    placement: ModuleType, workload: dict[str, Any], tmp_path: Path
) -> None:
    file, written = tmp_path / "three.json", []
    file.write_text(json.dumps(workload))
    for output in (tmp_path / "a.json", tmp_path / "b.json"):
        assert placement.main([str(file), "--devices", "50", "--output", str(output)]) == 0
        written.append(output.read_text())
    assert written[0] == written[1]


def test_sizes_may_be_parts_of_a_byte_and_ids_texts_in_one_place_and_numbers_in_another(
    placement: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three nodes of a tenth fit in 0.3, though 0.1 + 0.1 + 0.1 is more than that in floating point."""
    nodes = [{"id": i, "fpgaLatency": 1.0, "size": 0.1} for i in range(6)]
    edges = [{"sourceId": str(i), "destId": str(i + 1), "cost": 0.25} for i in range(5)]
    file = tmp_path / "tenths.json"
    file.write_text(json.dumps({"maxFPGAs": 2, "maxSizePerFPGA": 0.3, "nodes": nodes, "edges": edges}))
    assert placement.main([str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[2:4] == ["3.25", "3.25"]
    file.write_text(json.dumps({"maxFPGAs": 2, "maxSizePerFPGA": 0.25, "nodes": nodes, "edges": edges}))
    assert placement.main([str(file)]) == 1
    assert "(each byte of the file counts as 10)" in capsys.readouterr().out


def test_where_nothing_can_be_written_that_is_told(
    placement: ModuleType, workload: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "three.json"
    file.write_text(json.dumps(workload))
    assert placement.main([str(file), "--output", str(tmp_path / "none" / "out.json")]) == 1
    assert "--output cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["a.json", "--devices", "0"], ["a.json", "b/a.json", "--output", "c"]],
    ids=["devices", "names"],
)
def test_options_that_mean_nothing_are_refused(placement: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        placement.main(arguments)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"6": 1}, "colour class 1 is on devices"),
        ({"7": 2}, "not every node has one of 2 devices"),
        ({"1": 1, "6": 1, "2": 0, "5": 0, "3": 1, "4": 1}, "no chain of downsets"),
        ({"2": 0, "5": 0}, "holds 20.0 of 19.0 bytes"),
        ({"7": 1}, "the greatest load is"),
    ],
)
def test_the_checker_finds_faults(
    placement: ModuleType, workload: dict[str, Any], changed: dict[str, int], words: str
) -> None:
    workload["maxSizePerFPGA"] = 19.0
    devices = {"1": 0, "6": 0, "7": 0, "2": 1, "5": 1, "3": 1, "4": 1} | changed
    assert any(words in fault for fault in placement.check(workload, devices, 2, 8.0))
