"""Saves checkpoints from all ranks, at once or in the background."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from autovaruna.checkpoint import folder
from autovaruna.checkpoint.background import Background, mark_of
from autovaruna.checkpoint.checksum import Bytes
from autovaruna.checkpoint.commit import commit
from autovaruna.checkpoint.compose import Content, compose, config_files
from autovaruna.checkpoint.gaps import Gaps
from autovaruna.checkpoint.optimizer_state import STATE_PREFIX
from autovaruna.checkpoint.pace import Pace
from autovaruna.checkpoint.part import METADATA, Part, Report, cannot_write, report_of, write_part
from autovaruna.checkpoint.place import ask_differently, place_of
from autovaruna.checkpoint.snapshot import Snapshot
from autovaruna.checkpoint.stream import write_snapshot
from autovaruna.checkpoint.subject import Subject
from autovaruna.checkpoint.together import on_first, together
from autovaruna.errors import CheckpointError
from autovaruna.kinds import at_home
from autovaruna.runtime.worlds.world import World

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
    """Saves the checkpoints of one model; at most one of them is on its way.

    Args:
        world: The ranks.
        gaps: How much time there is between two steps of the optimizer.
    """

    def __init__(self, world: World, gaps: Gaps) -> None:
        self._world = world
        self._gaps = gaps
        self._claim = ExitStack()
        self._job: Background | None = None
        self._snapshot: Snapshot | None = None
        self._spare: list[Bytes] = []
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
        tempdir = way.tempdir and os.path.abspath(at_home(way.tempdir))  # the script may go to another folder
        way = replace(way, tempdir=tempdir)
        part = together(self._world, lambda: compose(subject, content, way.is_shared), "composing a checkpoint")
        extra_files, partial = on_first(
            self._world,
            lambda: (config_files(subject.model), self._begin(Path(place), content.step)),
            "beginning a checkpoint",
        )
        try:
            if way.in_background:
                self._start(subject, part, partial, content, way, extra_files)
            else:
                self._save_now(part, partial, content, way, extra_files)
                self._claim.close()
        except BaseException:
            if self._job is None:
                self._abandon(partial)
            raise

    def _abandon(self, partial: Path) -> None:
        if self._world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        self._claim.close()

    def _begin(self, root: Path, step: int) -> Path:
        try:
            return folder.begin(root.absolute(), step, self._claim)  # the script may go to another folder
        except OSError as error:
            raise cannot_write(root, error) from error

    def _compare(self, place: str, content: Content, way: Way) -> None:
        """Makes sure that the ranks save the same. Collective."""
        own = {"step": str(content.step), "background": str(way.in_background), "shard": str(way.is_shared)}
        own["keep"] = str(way.keep)
        if found := ask_differently(self._world, place, own, "saving a checkpoint"):
            raise CheckpointError(f"The ranks save different checkpoints: {found}. Expected the same on every rank.")

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

    def wait_snapshot(self) -> None:
        """Waits until weights and optimizer state may change without a trace in the checkpoint on its way."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None

    def _end(self, news: list[str | None]) -> None:
        """Forgets the checkpoint in the background, which is complete, or of which a part has failed."""
        job = self._job
        assert job is not None
        job.join()
        self._job = None
        error = job.error
        texts = self._world.gather_objects(job.news(), "the end of a checkpoint in the background")
        if any(texts):
            self._abandon(job.folder)
        self._claim.close()
        own = [text for text in texts if text and "it says why" not in text]
        first = next(iter(own or [text for text in news if text]), "")
        if first:
            raise CheckpointError(f"The checkpoint in the background failed: {first}") from error

    def _mark(self, partial: Path) -> None:
        try:
            mark_of(partial, self._world.rank).touch()
        except OSError as error:
            raise CheckpointError(
                f"rank {self._world.rank} cannot write to {partial}, which rank 0 has made: {error.strerror}. Expected "
                "a folder on a file system that all ranks share."
            ) from error

    def _save_now(
        self, part: Part, partial: Path, content: Content, way: Way, extra_files: Mapping[str, bytes]
    ) -> None:
        together(self._world, lambda: self._mark(partial), "finding the folder of a checkpoint")
        report = together(self._world, lambda: self._write(part, partial, way), "writing a checkpoint")
        reports = self._world.gather_objects(report, "completing a checkpoint")
        path = on_first(
            self._world,
            lambda: str(commit(partial, content.step, reports, extra_files, way.keep)),
            "completing a checkpoint",
        )
        if self._world.rank == 0:
            logger.info("saved the checkpoint %s", path)

    def _write(self, part: Part, partial: Path, way: Way) -> Report:
        try:
            return write_part(part, partial, way.tempdir)
        finally:  # before rank 0 hears of it, and gives the folder its name
            mark_of(partial, self._world.rank).unlink(missing_ok=True)

    def _start(
        self,
        subject: Subject,
        part: Part,
        partial: Path,
        content: Content,
        way: Way,
        extra_files: Mapping[str, bytes],
    ) -> None:
        snapshot = together(self._world, lambda: self._shot(part, subject, partial), "copying a checkpoint")
        report = report_of(part, {})
        pace = Pace(sum(layout.num_bytes for layout in snapshot.layouts.values()))
        self._snapshot = snapshot
        self._watch_the_end()
        self._job = Background(
            partial,
            self._world.rank,
            self._world.num_ranks,
            lambda: replace(report, files=write_snapshot(snapshot, partial, way.tempdir, pace)),
            lambda reports: self._complete(commit(partial, content.step, reports, extra_files, way.keep)),
            pace,
        )

    def _complete(self, path: Path) -> Path:
        self._claim.close()  # others may read it from now on
        return path

    def _shot(self, part: Part, subject: Subject, partial: Path) -> Snapshot:
        self._mark(partial)
        return Snapshot(part.files(), _steady(part, subject), METADATA, self._gaps.seconds_left(), self._spare)

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
            try:
                self._world.abort(self._job.error, f"rank {self._world.rank} failed: a checkpoint in the background")
            except SystemExit:
                sys.stderr.flush()
                os._exit(1)


def _steady(part: Part, subject: Subject) -> set[tuple[str, str]]:
    """Returns file and name of what changes in the optimizer's step alone: its parameters and its state."""
    if subject.optimizer is None:
        return set()
    held = {id(parameter) for group in subject.optimizer.optimizer.param_groups for parameter in group["params"]}
    tensors = {name: subject.state.tensor(subject.state.first_name[name]) for name in part.weights}
    weights = {(part.weight_file, name) for name, tensor in tensors.items() if id(tensor) in held}
    return weights | {(part.other_file, name) for name in part.others if name.startswith(STATE_PREFIX)}
