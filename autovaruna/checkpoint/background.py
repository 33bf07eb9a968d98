"""Writes a checkpoint in a thread of each rank; they find each other through files, so that no rank need wait.

A rank that writes has a mark in the folder. When its part is on the disk, it puts its report there and takes the mark
away; if it fails, it takes the mark away alone (which works on a full disk too). Rank 0 waits for the reports and
completes the checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from autovaruna.checkpoint.manifest import write_synced
from autovaruna.checkpoint.pace import Pace
from autovaruna.checkpoint.part import Report, cannot_write
from autovaruna.errors import CheckpointError

POLL_SECONDS = 0.02

logger = logging.getLogger(__name__)


def mark_of(folder: Path, rank: int) -> Path:
    """Returns the mark of a rank that is writing."""
    return folder / f".rank-{rank:05d}"


def report_of(folder: Path, rank: int) -> Path:
    """Returns the report of a rank that has written its part."""
    return folder / f".rank-{rank:05d}.json"


class Background:
    """A checkpoint on its way.

    Args:
        folder: Where it grows; every rank has its mark in it.
        rank: This rank.
        num_ranks: N.
        write: Writes this rank's part.
        complete: Completes the checkpoint from the reports; for rank 0.
        pace: How urgent it is.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        num_ranks: int,
        write: Callable[[], Report],
        complete: Callable[[list[Report]], Path],
        pace: Pace,
    ) -> None:
        self.folder = folder
        self.error: BaseException | None = None
        self._rank = rank
        self._num_ranks = num_ranks
        self._write = write
        self._complete = complete
        self._pace = pace
        self._thread = threading.Thread(target=self._run, name=f"autovaruna checkpoint {folder.name}")
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives no more threads: the other ranks must hear of it, too
            self._fail(error)

    def join(self) -> None:
        """Waits until this rank has nothing more to do."""
        self._pace.hurry()
        if self._thread.ident is not None:
            self._thread.join()

    def news(self) -> str | None:
        """Returns None while it is at work, an empty text if it is done, else what went wrong."""
        if self._thread.is_alive():
            return None
        return "" if self.error is None else str(self.error)

    def _run(self) -> None:
        try:
            self._write_and_report()
            if self._rank == 0:
                path = self._complete(self._collect())
                logger.info("saved the checkpoint %s", path)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        logger.error("the checkpoint %s failed: %s", self.folder, error)
        mark_of(self.folder, self._rank).unlink(missing_ok=True)
        self._clean_up()

    def _write_and_report(self) -> None:
        try:
            report = self._write()
            path = report_of(self.folder, self._rank)
            write_synced({path.with_suffix(".part"): json.dumps(report.to_json()).encode()})
            os.rename(path.with_suffix(".part"), path)
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        finally:
            mark_of(self.folder, self._rank).unlink(missing_ok=True)

    def _collect(self) -> list[Report]:
        reports = []
        for rank in range(self._num_ranks):
            while mark_of(self.folder, rank).exists():
                time.sleep(POLL_SECONDS)
            try:
                reports.append(Report.from_json(json.loads(report_of(self.folder, rank).read_bytes())))
            except OSError as error:
                raise CheckpointError(
                    f"rank {rank} could not write its part of the checkpoint {self.folder.name}; it says why."
                ) from error
        for rank in range(self._num_ranks):
            report_of(self.folder, rank).unlink()
        return reports

    def _clean_up(self) -> None:
        if self._rank == 0:  # another rank may still write: whatever it leaves goes with the next checkpoint
            for rank in range(self._num_ranks):
                while mark_of(self.folder, rank).exists():
                    time.sleep(POLL_SECONDS)
            shutil.rmtree(self.folder, ignore_errors=True)
