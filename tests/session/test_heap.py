"""What the C library's heap takes for each byte of tensors, as the environment says."""

from __future__ import annotations

import pytest
import torch

from autovaruna.session import machine


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1:glibc.malloc.tcache_count=0", machine._FRAGMENTATION),
        ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=01", machine._FRAGMENTATION_WITH_CACHE),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536", 1.0),
        ("MALLOC_MMAP_THRESHOLD_", "4096", 1.0),
        ("MALLOC_MMAP_THRESHOLD_", str(1 << 25), machine._FRAGMENTATION_WITH_CACHE),
    ],
)
def test_small_pieces_cost_more_and_mapped_tensors_nothing(
    name: str, value: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert machine._fragmentation(torch.device("cpu")) == expected


class Library:
    """A C library that notes what it is told."""

    def __init__(self) -> None:
        self.told: dict[int, int] = {}

    def mallopt(self, option: int, value: int) -> None:
        self.told[option] = value


@pytest.mark.parametrize("is_set", [False, True])
def test_small_pieces_join_their_neighbours_unless_the_user_has_decided(
    is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: library)
    if is_set:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4096")
    machine.keep_freed_memory()
    m_mxfast = 1
    assert library.told.get(m_mxfast) == (None if is_set else 0)
