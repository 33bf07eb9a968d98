"""Saves checkpoints from all ranks, at once or in the background.

In the background, a rank copies its part to memory of its own, and one thread writes the copy. The threads of the ranks
find each other through files, for messages belong to the training: a rank that writes has a mark in the folder. When
its files are on the disk, the mark gets its report; if it fails, the mark goes (which works on a full disk too). Rank 0
waits for the reports and completes the checkpoint.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autovaruna.checkpoint import folder
from autovaruna.checkpoint.collective import different_requests, gather, on_first, place_of, together
from autovaruna.checkpoint.state import Content, Part, Subject, compose, config_files
from autovaruna.checkpoint.write import HostMemory, Report, cannot_write, commit, mark_of, write_part
from autovaruna.config.files import at_home, read_record
from autovaruna.errors import CheckpointError
from autovaruna.runtime.world import World

POLL_SECONDS = 0.02

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Way:
    """How a checkpoint is saved.

    Attributes:
        keep: how many checkpoints stay in the folder; None: all.
        tempdir: a local folder where files are written first.
        is_shared: whether replicas share the writing.
        in_background: whether training goes on meanwhile.
    """

    keep: int | None = None
    tempdir: str | None = None
    is_shared: bool = True
    in_background: bool = False


class Saver:
    """Saves the checkpoints of one model; at most one of them is on its way."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._memory = HostMemory()
        self._locks = ExitStack()
        self._job: BackgroundWrite | None = None
        self._is_watching_the_end = False

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint in the background has not been seen to be complete; the same on every rank."""
        return self._job is not None

    def save(self, subject: Subject, root: str | os.PathLike[str], content: Content, way: Way) -> None:
        """Saves a checkpoint. Collective.

        Raises:
            CheckpointError: it cannot be saved; the same on every rank. What was there before is as it was.
        """
        self.wait()
        place = place_of(root)
        self._compare(place, content, way)
        way = replace(way, tempdir=way.tempdir and os.path.abspath(at_home(way.tempdir)))  # the script may go elsewhere
        part, needs = self._compose(subject, content, way)
        copies = way.in_background and self._has_room(needs)
        extra_files, partial = on_first(
            self._world,
            lambda: (config_files(subject.model), self._begin(Path(place), content.step)),
            "beginning a checkpoint",
        )

        def complete(reports: Sequence[Report]) -> None:
            path = commit(partial, content.step, reports, extra_files, way.keep)
            self._locks.close()  # others may read it from now on
            logger.info("saved the checkpoint %s", path)

        try:
            self._write(part, partial, way.tempdir, copies, complete)
        except BaseException:
            if self._job is None:
                self._abandon(partial)
            raise

    def _write(
        self, part: Part, partial: Path, tempdir: str | None, copies: bool, complete: Callable[[Sequence[Report]], None]
    ) -> None:
        """Writes this rank's part, or has a thread write a copy; rank 0 completes the checkpoint. Collective."""

        def get_ready() -> Part:
            self._mark(partial)
            return replace(part, files=self._memory.copy(part)) if copies else part

        ready = together(self._world, get_ready, "copying a checkpoint")
        act = functools.partial(write_part, ready, partial, tempdir)
        if copies:
            self._watch_the_end()
            self._job = BackgroundWrite(partial, self._world, act, complete)
        else:
            reports = gather(self._world, act, "writing a checkpoint")
            on_first(self._world, lambda: complete(reports), "completing a checkpoint")

    def _compare(self, place: str, content: Content, way: Way) -> None:
        """Makes sure that the ranks save the same. Collective."""
        own = {"step": str(content.step), "background": str(way.in_background), "shard": str(way.is_shared)}
        own["keep"] = str(way.keep)
        if found := different_requests(self._world, place, own, "saving a checkpoint"):
            raise CheckpointError(f"The ranks save different checkpoints: {found}. Expected the same on every rank.")

    def _compose(self, subject: Subject, content: Content, way: Way) -> tuple[Part, list[tuple[int, float]]]:
        """Returns this rank's part, and what each rank needs and has of memory for a copy. Collective."""
        parts: list[Part] = []

        def act() -> tuple[int, float]:
            parts.append(compose(subject, content, way.is_shared))
            return self._memory.missing_bytes(parts[0]), available_bytes()

        needs = gather(self._world, act, "composing a checkpoint")
        return parts[0], needs

    def _has_room(self, needs: Sequence[tuple[int, float]]) -> bool:
        """Says whether each host has memory for the copies of its ranks; the same on every rank."""
        missing: Counter[str] = Counter()
        for host, (num_bytes, _) in zip(self._world.hosts, needs, strict=True):
            missing[host] += num_bytes
        for host, (_, available) in zip(self._world.hosts, needs, strict=True):
            if missing[host] > available:
                if self._world.rank == 0:
                    logger.warning(
                        "save_checkpoint(background=True) first copies the state to memory of the host: that takes "
                        "%.1f GB of %s, which has %.1f GB left. So training waits until the files are written",
                        *(missing[host] / 1e9, host, available / 1e9),
                    )
                return False
        return True

    def _begin(self, root: Path, step: int) -> Path:
        try:
            return folder.begin(root.absolute(), step, self._locks)  # the script may go to another folder
        except OSError as error:
            raise cannot_write(root, error) from error

    def _mark(self, partial: Path) -> None:
        try:
            mark_of(partial, self._world.rank).touch()
        except OSError as error:
            raise CheckpointError(
                f"rank {self._world.rank} cannot write to {partial}, which rank 0 has made: {error.strerror}. Expected "
                "a folder on a file system that all ranks share."
            ) from error

    def poll(self) -> None:
        """Looks how the checkpoint in the background is doing. Collective while `is_busy`; never waits for it.

        Raises:
            CheckpointError: it failed, on this rank or another.
        """
        if self._job is None:
            return
        news = self._world.gather_objects(self._job.news(), "a checkpoint in the background")
        if any(news) or all(text == "" for text in news):
            self._end(news)

    def wait(self) -> None:
        """Waits until the checkpoint in the background is complete. Collective; raises as `poll`."""
        if self._job is not None:
            self._job.join()
            self.poll()

    def _end(self, news: Sequence[str | None]) -> None:
        """Forgets the checkpoint in the background, which is complete, or of which a part has failed."""
        job = self._job
        assert job is not None
        job.join()
        self._job = None
        texts = self._world.gather_objects(job.news(), "the end of a checkpoint in the background")
        if any(texts):
            self._abandon(job.folder)
        own = [text for text in texts if text and "it says why" not in text]
        if first := next(iter(own or [text for text in news if text]), ""):
            raise CheckpointError(f"The checkpoint in the background failed: {first}") from job.error

    def _abandon(self, partial: Path) -> None:
        """Removes what was written of a checkpoint when no rank writes any more."""
        if self._world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        self._locks.close()

    def _watch_the_end(self) -> None:
        if not self._is_watching_the_end:
            self._is_watching_the_end = True
            atexit.register(self._at_end, os.getpid())

    def _at_end(self, process: int) -> None:
        """Ends the program with an error if a checkpoint in the background failed and nobody has heard of it."""
        if self._job is None or os.getpid() != process:
            return
        self._job.join()
        if self._job.error is not None:
            self._abandon(self._job.folder)
            try:
                self._world.abort(self._job.error, f"rank {self._world.rank} failed: a checkpoint in the background")
            except SystemExit:
                sys.stderr.flush()
                os._exit(1)


class BackgroundWrite:
    """A checkpoint on its way: a thread of this rank writes its part.

    Attributes:
        folder: where it grows; every rank has its mark in it.
        error: what went wrong on this rank; None: nothing so far.
    """

    def __init__(
        self, folder: Path, world: World, write: Callable[[], Report], complete: Callable[[Sequence[Report]], None]
    ) -> None:
        self.folder = folder
        self.error: BaseException | None = None
        self._rank = world.rank
        self._num_ranks = world.num_ranks
        self._write = write
        self._complete = complete
        self._thread = threading.Thread(target=self._run, name=f"autovaruna checkpoint {folder.name}")
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives no more threads: the other ranks must hear of it, too
            self._fail(error)

    def join(self) -> None:
        """Waits until this rank has nothing more to do."""
        if self._thread.ident is not None:
            self._thread.join()

    def news(self) -> str | None:
        """Returns None while it is at work, an empty text if it is done, else what went wrong."""
        if self._thread.is_alive():
            return None
        return "" if self.error is None else str(self.error)

    def _run(self) -> None:
        try:
            self._leave(self._write())
            if self._rank == 0:
                self._complete([self._report_of(rank) for rank in range(self._num_ranks)])
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        logger.error("the checkpoint %s failed: %s", self.folder, error)
        mark_of(self.folder, self._rank).unlink(missing_ok=True)

    def _leave(self, report: Report) -> None:
        """Puts this rank's report into its mark, whole or not at all."""
        mark = mark_of(self.folder, self._rank)
        try:
            mark.with_suffix(".part").write_text(json.dumps(asdict(report)))
            os.replace(mark.with_suffix(".part"), mark)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def _report_of(self, rank: int) -> Report:
        """Waits for a rank's report."""
        try:
            while not (text := mark_of(self.folder, rank).read_text()):
                time.sleep(POLL_SECONDS)
        except OSError as error:
            raise CheckpointError(
                f"rank {rank} could not write its part of the checkpoint {self.folder.name}; it says why."
            ) from error
        return read_record(json.loads(text), Report)


def available_bytes() -> float:
    """Returns the memory of this host that programs can have; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    known = dict(line.split(":") for line in lines)
    return 1024.0 * int(known["MemAvailable"].split()[0]) if "MemAvailable" in known else float("inf")
