"""Copies between hosts take a share of their link, whatever it carries, and half of that where steps need it, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from autovaruna.checkpoint.folder import write_file
from autovaruna.elastic import copies
from autovaruna.elastic.job_folder import RankPart, write_record

BURST_SECONDS = 0.01  # of what a link carries, which it takes at once, as if it were faster


@dataclass
class Link:
    """A clock, and a connection to a keeper that is so far away, over a link that others use by `load`."""

    bytes_per_second: float
    latency: float
    load: float = 0.0
    now: float = 0.0
    pieces: list[tuple[float, int]] = field(default_factory=list)
    tokens: float = 0.0
    _at: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def send_bytes(self, data: bytes) -> None:
        rate = self.bytes_per_second * (1 - self.load)
        self.tokens = 0.0 if self.load else min(BURST_SECONDS * rate, self.tokens + (self.now - self._at) * rate)
        sent_at_once, self._at = min(self.tokens, len(data)), self.now
        self.tokens -= sent_at_once
        self.now += (len(data) - sent_at_once) / rate
        self.pieces.append((self.now, len(data)))

    def recv_bytes(self) -> bytes:
        self.now += 2 * self.latency
        return b"taken"

    def taken(self, since: float = 0.0) -> float:
        """Returns the share of the link that was taken."""
        return sum(size for when, size in self.pieces if when > since) / (self.now - since) / self.bytes_per_second


def part_of(slot: Path, num_bytes: int) -> Path:
    slot.mkdir(parents=True, exist_ok=True)
    record = write_file(slot / "weights", [np.zeros(num_bytes, np.uint8)], is_new=True)
    write_record(slot, RankPart({"weights": record}, {}, 0, {}, 3, 0, 1, {}))
    return slot


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("latency", [0.0, 1e-3, 20e-3])
@pytest.mark.parametrize("rate", [1.25e6, 12.5e6, 125e6])
def test_copies_take_their_share_of_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, latency: float, share: float
) -> None:
    slot = part_of(tmp_path, min(int(rate * share * 20), 96 << 20))
    link = Link(rate, latency)
    monkeypatch.setattr(copies, "time", link)
    pace = copies.CopyPace(share, lambda: False)
    copies.send_part(link, slot, 1, pace)  # type: ignore[arg-type]
    is_far = 2 * latency > copies._PIECE_SECONDS / share  # a piece each time, there and back
    assert link.taken() < 1.25 * share and (is_far or link.taken() > 0.5 * share)
    link.load, begin = 0.8, link.now  # once it is measured
    with monkeypatch.context() as patch:
        patch.setattr(pace, "begin_part", lambda: None)
        copies.send_part(link, slot, 1, pace)  # type: ignore[arg-type]
    assert link.taken(begin) < 0.65 * share


def test_copies_are_hurried_where_ranks_wait_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, link = part_of(tmp_path, 32 << 20), Link(12.5e6, 0.0)
    monkeypatch.setattr(copies, "time", link)
    copies.send_part(link, slot, 1, copies.CopyPace(0.01, lambda: True))  # type: ignore[arg-type]
    assert link.now < 1.05 * (32 << 20) / 12.5e6


def test_a_small_part_that_had_to_wait_for_a_core_is_not_taken_for_a_slow_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, link = part_of(tmp_path, 3000), Link(125e6, 0.5)
    monkeypatch.setattr(copies, "time", link)
    pace = copies.CopyPace(0.1, lambda: False)
    for _ in range(5):
        copies.send_part(link, slot, 1, pace)  # type: ignore[arg-type]
    assert link.now < 5 * 4 * 0.5 + 5 * 10 * 3000 / copies._SLOWEST + 0.5
