"""Sets up every test: one thread a process, a configuration directory of its own, no saved deployment."""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rest import duration, mark_rest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads: ranks share few cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

KEEPING_RANKS = ("mpi", "integrations")
"""Folders whose tests hand ranks that have started on to each other."""
FIRST = (
    "hosts/test_morphing.py",
    "test_docs.py",
    "compatibility/test_compatibility.py",
    "elastic/test_slurm.py",
    "graph/test_idioms.py",
    "session/test_partitions.py",
    "elastic/test_restarts.py",
    "session/test_ranks.py",
    "session/test_optimizers.py",
    "elastic/test_snapshots.py",
    "session/test_drawn.py",
    "graph/test_changed_state.py",
    "test_examples.py",
    "session/test_precision.py",
    "graph/test_losses.py",
    "hosts/test_launcher.py",
    "varuna/test_steps.py",
    "checkpoint/test_any_to_any.py",
    "planner/test_large.py",
)
"""The other files that take longest; those that wait for processes stand between those that compute.

Workers take whole files: one that begins last is waited for with idle cores.
"""


def pytest_report_header(config: pytest.Config) -> str:
    return duration(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_rest(items)
    here, places = Path(__file__).parent, {name: place for place, name in enumerate(FIRST)}

    def place_of(item: pytest.Item) -> int:
        name = os.path.relpath(item.path, here)
        return -1 if name.startswith(KEEPING_RANKS) else places.get(name, len(FIRST))

    items.sort(key=place_of)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Has one worker run all tests that keep ranks, while others take a file at a time."""
    from xdist.scheduler import LoadFileScheduling

    class ByRanks(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "ranks" if file.startswith(tuple(f"tests/{folder}/" for folder in KEEPING_RANKS)) else file

    return ByRanks(config, log)


def pytest_collection_finish() -> None:
    """Has the collector of garbage do less, fake tensors begin on the main thread, and torch's tracer write nothing.

    To a logger that does not propagate pytest adds handlers, for which torch prints each graph, with stacks of calls.
    Where torch 2.11 finds no GPU, it crashes if they began on a thread that has ended; ranks are threads in tests.
    """
    from tests.collector import spare_collector

    if "torch" in sys.modules:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            pass
        records = logging.getLogger("torch.__trace")
        records.propagate, records.handlers = True, []
    spare_collector()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ends the ranks that were kept for further tests, where the next one needs none."""
    launch = sys.modules.get("tests.mpi.launch")
    if launch is not None and (nextitem is None or nextitem.path.parent.name not in KEEPING_RANKS):
        launch.end_kept_ranks()


def pytest_unconfigure() -> None:
    """Has the interpreter end without going over all that the tests left."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps a user's settings and saved deployments away from the tests."""
    monkeypatch.setenv("AUTOVARUNA_CONF_DIR", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("AUTOVARUNA_") and name != "AUTOVARUNA_CONF_DIR"]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _own_seed() -> None:
    """Starts every test from the same state of torch's generator."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has ranks look at their speeds for a moment only: what else runs beside the tests is not what these are about."""
    for name in ("_LEAST_SECONDS", "_MOST_SECONDS"):
        monkeypatch.setattr(f"autovaruna.profiler.measure.{name}", 0.0)
