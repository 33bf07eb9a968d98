"""The profiler's folder, and what `AutoConfig` makes of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autovaruna.errors import InputError, MeasureError, PlanError
from autovaruna.graph.records import CutMark
from autovaruna.profiler import measure as measuring
from autovaruna.varuna import AutoConfig, Profiler
from autovaruna.varuna.profiler import Facts, ProfileFolder
from tests.planner.cases import make_cluster, make_graph, make_profile
from tests.varuna.scripts import LAYERS, batch, net, on_ranks


def profiled(folder: Path, sizes: tuple[int, ...] = (1, 4), num_ranks: int = 2, **options: Any) -> list[Any]:
    def script(world: Any) -> Any:
        profiler = Profiler(net(), batch, device="cpu", out_folder=folder, **options)
        profiler.set_optimizer(torch.optim.SGD(profiler.model.parameters(), lr=0.1))
        return profiler.profile_all(sizes)

    return on_ranks(num_ranks, script)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the model on two ranks."""
    path = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOVARUNA_CONF_DIR", str(path))
        profiled(path, gpus_per_node=4)
    return path


def test_all_ranks_get_the_same_profile_and_files_are_json(folder: Path, tmp_path: Path) -> None:
    first, second = profiled(tmp_path / "again", from_cache=False)
    assert first == second and first.micro_batch_sizes == (1, 4)
    names = {path.name for path in folder.glob("*.json")}
    assert names == {"profile.json", "graph.json", "cluster.json", "facts.json"}
    assert all(json.loads(path.read_text()) for path in folder.rglob("*.json"))
    facts = json.loads((folder / "facts.json").read_text())
    assert facts == {"gpus_per_node": 4, "optimizer_bytes_factor": 0.0, "checksum": facts["checksum"]}


def test_a_run_that_was_stopped_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the folder is not measured again."""
    monkeypatch.delattr(measuring, "measure_one")
    assert profiled(folder, add_to_existing=True, from_cache=False)[0] is not None


def test_parts_between_cut_points_are_measured_one_after_the_other(tmp_path: Path) -> None:
    every = list(range(LAYERS + 1))
    options: dict[str, Any] = {"sizes": (2,), "from_cache": False, "add_to_existing": True}
    assert profiled(tmp_path, pstages_to_profile=every[:1], **options) == [None, None]
    assert all(profiled(tmp_path, pstages_to_profile=every[1:], **options))
    with pytest.raises(InputError, match=f"from 0 to {LAYERS}"):
        Profiler(net(), batch, device="cpu", out_folder=tmp_path, pstages_to_profile=[9])


def test_the_fastest_is_found_for_other_numbers_of_ranks(folder: Path) -> None:
    config = AutoConfig(8, 64, folder)
    stages, size, seconds = config.get_min()
    assert config.batch_times[stages] == seconds == min(config.batch_times.values())
    found = config.info(stages, size)
    assert found.num_stages * found.num_replicas <= 8 and found.micro_batch_size == size
    assert found.num_micro_batches * size >= 64
    assert set(config.batch_times) == set(range(1, LAYERS + 2))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda folder: AutoConfig(0, 8, folder), "num_ranks is 0"),
        (lambda folder: AutoConfig(2.5, 8, folder), "num_ranks is 2.5"),
        (lambda folder: AutoConfig(2, "8", folder), "batch_size is '8'"),
        (lambda folder: AutoConfig(2, 8, folder, memory_bytes=0), "memory_bytes is 0"),
        (lambda folder: AutoConfig(2, 8, folder).info(0), "stages is 0"),
        (lambda folder: AutoConfig(2, 8, folder).info(2, -1), "micro_batch_size is -1"),
        (lambda folder: profiled(folder, sizes=2), "microbatches_to_profile is 2; expected several"),
    ],
)
def test_numbers_that_cannot_be_used_are_named(ask: Any, words: str, folder: Path) -> None:
    with pytest.raises(InputError, match=words):
        ask(folder)


def test_memory_is_a_limit(tmp_path: Path) -> None:
    """Varuna's check can reject nothing."""
    graph = make_graph(8)
    parameters = tuple(replace(each, num_bytes=2**30) for each in graph.parameters)
    graph = replace(graph, parameters=parameters, cut_marks=tuple(CutMark(f"cut{k}", k) for k in range(1, 8)))
    written = ProfileFolder(tmp_path)
    written.write(graph=graph, cluster=make_cluster(2), facts=Facts(4, 2.0))
    written.write(profile=make_profile(graph))
    assert 1 in AutoConfig(4, 8, tmp_path).batch_times
    found = AutoConfig(4, 8, tmp_path, memory_bytes=20 * 2**30)  # weights, gradients and AdamW's state: 32 GiB
    assert set(found.batch_times) == {2, 3, 4}
    assert all(choice.memory_bytes <= 20 * 2**30 for choice in found.choices)
    with pytest.raises(PlanError, match="missing"):
        AutoConfig(4, 8, tmp_path, memory_bytes=2**30).get_min()


def test_folders_of_an_older_library_are_read(folder: Path, tmp_path: Path) -> None:
    """They do not say what each rank's own process holds."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    content = json.loads((folder / "cluster.json").read_text())
    assert len(content["own_process_bytes"]) == 2
    del content["own_process_bytes"], content["checksum"]
    (tmp_path / "cluster.json").write_text(json.dumps(content))
    _, _, older, _ = ProfileFolder(tmp_path).read()
    assert older.own_process_bytes == () and older.num_ranks == 2


def test_what_is_missing_or_damaged_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="profile"):
        AutoConfig(2, 8, tmp_path / "nowhere")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "cluster.json").write_text('{"hosts": 3}')
    with pytest.raises(MeasureError, match=r"cluster\.json is damaged"):
        AutoConfig(2, 8, tmp_path)
    (tmp_path / "cluster.json").write_text((folder / "cluster.json").read_text().replace("0", "1", 1))
    with pytest.raises(MeasureError, match=r"cluster\.json is damaged: checksum is .* take checksum out"):
        AutoConfig(2, 8, tmp_path)
