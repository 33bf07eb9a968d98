"""Holds that ranks measure together what no rank knows, each part once, whatever lies in the cache of which host."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from autovaruna import AutoVaruna
from autovaruna.profiler import measure
from autovaruna.runtime.transport.threads import run_ranks
from autovaruna.runtime.world import World
from autovaruna.session import measuring
from tests.profiler.models import WIDTH, Mlp

QUIET: dict[str, Any] = {"load_deployment": False, "save_deployment": False, "profile_iterations": 1, "progress": False}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Counts what is measured, by part and micro-batch size, on all ranks together."""
    counted: Counter[tuple[str, int]] = Counter()
    measure_one = measure._measure_one

    def counting(part: Any, samples: Any, size: int, *rest: Any) -> Any:
        counted[part.signature, size] += 1
        return measure_one(part, samples, size, *rest)

    monkeypatch.setattr(measure, "_measure_one", counting)
    return counted


def first_call(num_layers: int, **settings: Any) -> None:
    model = AutoVaruna(Mlp(num_layers), inputs="replicated", seed=0, num_micro_batches=2, **QUIET, **settings)
    model(torch.zeros(4, WIDTH)).backward()


def test_a_second_run_measures_nothing(measured: Counter[tuple[str, int]]) -> None:
    run_ranks(2, lambda world: first_call(8, num_stages=2))
    assert measured and set(measured.values()) == {1}
    measured.clear()
    run_ranks(2, lambda world: first_call(8, num_stages=2))
    assert not measured
    run_ranks(2, lambda world: first_call(8, num_stages=2, profile_cache=False))
    assert set(measured.values()) == {1}


def test_hosts_that_know_different_parts_measure_what_none_knows(
    measured: Counter[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(2, lambda world: first_call(8, num_stages=2, profile_cache=tmp_path / "all"))
    files = sorted((tmp_path / "all").glob("*/*.json"))
    for place, file in enumerate(files[1:]):  # the first one is known nowhere
        copied = tmp_path / f"host{place % 2}" / file.parent.name / file.name
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(file.read_text())
    measured.clear()
    cache_of = measuring.cache_of
    monkeypatch.setattr(
        measuring, "cache_of", lambda settings, device, _, **more: cache_of(settings, device, 2, **more)
    )

    def on_own_host(world: World) -> None:
        world.hosts = ("host0", "host1")
        first_call(8, num_stages=2, profile_cache=tmp_path / f"host{world.rank}")

    run_ranks(2, on_own_host)
    assert [f"{signature}-{size}.json" for signature, size in measured] == [files[0].name]
    assert all((tmp_path / host / files[0].parent.name / files[0].name).exists() for host in ("host0", "host1"))
