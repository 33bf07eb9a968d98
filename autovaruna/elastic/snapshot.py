"""Keeps a rank's part of the newest states in memory of its host, for the ranks that come after it.

A snapshot is a checkpoint whose files lie in memory. It is taken where the optimizer has stepped and the next call
begins, on all ranks at the same step. A rank writes to the older of its two slots, once every rank has the newer one,
and every host a copy of another's. So whenever the job ends, some step is whole.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from autovaruna.checkpoint.folder import write_file
from autovaruna.checkpoint.save import chunks_of
from autovaruna.checkpoint.state import Content, ModelInTraining, compose, config_files
from autovaruna.elastic.job_folder import (
    ALONE,
    COPIED,
    HOLD,
    LEAVE,
    JobPlace,
    RankPart,
    Reporter,
    clear_slot,
    folders_in,
    number_in,
    record_full,
    slots_of,
    write_record,
)
from autovaruna.errors import CheckpointError

_TIME_SHARE = 0.01  # of a step's seconds that snapshots may take
_FIRST_TIME_SHARE = 0.5  # the same while their files are made, which takes longer than to overwrite them
_NUM_TIMED = 8  # the fastest of the last snapshots, and of the last steps, counts: others have waited
_LEAVING_SECONDS = 10.0

logger = logging.getLogger(__name__)


class HasPosition(Protocol):
    """A sampler that can say where its samples go on, as `ElasticSampler`."""

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Snapshots:
    """Takes the snapshots of one rank; `reporter` shows what they are of."""

    def __init__(self, place: JobPlace, rank: int, reporter: Reporter) -> None:
        self._place = place
        self._folder = place.of_rank(rank)
        self._reporter = reporter
        self._slots = slots_of(self._folder)
        self._next = 0
        self._latest: int | None = None
        self._texts: dict[str, str] | None = None
        self._seconds: deque[float] = deque(maxlen=_NUM_TIMED)
        self._period = 1
        self._steps_since = 0
        self._step_seconds: deque[float] = deque(maxlen=_NUM_TIMED)
        self._is_broken = False
        self._before: tuple[int, float] | None = None

    def begin_border(self, num_steps: int) -> None:
        """Records that the optimizer has stepped: how long steps take is measured from one such border to the next."""
        now = time.perf_counter()
        if self._before is not None and num_steps > self._before[0]:
            self._step_seconds.append((now - self._before[1]) / (num_steps - self._before[0]))
        self._before = num_steps, now
        self._steps_since += 1

    @property
    def is_ready(self) -> bool:
        """Whether this rank can take the next snapshot, and enough steps have passed since the last."""
        if self._is_broken or self._steps_since < self._period:
            return False
        return self._is_copied and not (Path(self._place.folder) / HOLD).exists() and self._has_room

    @property
    def _has_room(self) -> bool:
        """Whether the host has memory for new files of all its ranks where a checkpoint is written from the old."""
        old = [path.stat() for path in self._slots[self._next].glob("*")]
        num_bytes, free = sum(each.st_size for each in old if each.st_nlink > 1), os.statvfs(self._folder)
        return free.f_bavail * free.f_frsize >= num_bytes * len(folders_in(self._folder.parent, "rank-"))

    @property
    def _is_copied(self) -> bool:
        """Whether another host has the latest snapshot of this one's ranks, where there are others."""
        if self._place.num_hosts == 1 or self._latest is None:
            return True
        folder = self._folder.parent
        return number_in(folder / COPIED) >= self._latest or (folder / ALONE).exists()

    @property
    def is_to_leave(self) -> bool:
        """Whether the manager wants the job to end at the next border."""
        return (Path(self._place.folder) / LEAVE).exists()

    def write(self, subject: ModelInTraining, content: Content) -> None:
        """Writes this rank's part, at the same step as all ranks; where memory is short, it is the last one."""
        begin = time.perf_counter()
        try:
            self._write(subject, content)
        except (OSError, CheckpointError) as error:
            self._is_broken = True
            record_full(Path(self._place.folder), error)
            logger.warning("no more snapshots in memory of this host: %s", error)
            return
        self._reporter.record_snapshot(self._next, content.step)
        self._next = 1 - self._next
        self._latest, self._steps_since = content.step, 0
        seconds = time.perf_counter() - begin
        self._seconds.append(seconds)
        if self._step_seconds:
            share = _TIME_SHARE if len(self._seconds) > len(self._slots) else _FIRST_TIME_SHARE
            self._period = max(1, math.ceil(min(self._seconds) / (share * min(self._step_seconds))))
        if self._before is not None:
            self._before = self._before[0], self._before[1] + seconds

    def _write(self, subject: ModelInTraining, content: Content) -> None:
        slot = self._slots[self._next]
        part = compose(subject, content, is_shared=True)
        self._reporter.record_snapshot(self._next, -1)
        clear_slot(slot, part.files)
        files = {name: write_file(slot / name, chunks_of(rows), False, False) for name, rows in part.files.items()}
        world = subject.world
        if self._texts is None:
            configuration = config_files(subject.model) if world.rank == 0 else {}
            self._texts = {name: data.decode() for name, data in configuration.items()}
        written = files, part.weights, part.num_weight_bytes, part.documents
        write_record(slot, RankPart(*written, content.step, world.rank, world.num_ranks, self._texts))

    def wait_for_copy(self) -> None:
        """Returns when the latest snapshot is on another host, too, or the host does not answer for long."""
        (Path(self._place.folder) / LEAVE).touch()  # all ranks leave, however it came: the network is free for copies
        deadline = time.monotonic() + _LEAVING_SECONDS
        while not self._is_copied and time.monotonic() < deadline:
            time.sleep(0.01)
