"""Saves checkpoints from all ranks, at once or in the background.

The bytes of tensors (`tensor_file.lay_out`) are written from where they are: in the model, or, in the background, in a
copy (`HostMemory`) that a thread writes while training goes on. Threads of several ranks send no messages, which belong
to training: each rank has a mark, a file in the checkpoint's folder. Once its files are on the disk, the mark gets the
record of its part. If it fails, the mark is removed (which works on a full disk too). Rank 0 waits for all records.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from autovaruna.checkpoint import folder
from autovaruna.checkpoint.folder import cannot_write, commit, different_requests, mark_of, place_of, write_file
from autovaruna.checkpoint.manifest import CHUNK_BYTES, Bytes, WrittenPart
from autovaruna.checkpoint.state import Content, ModelInTraining, RankState, compose, config_files
from autovaruna.checkpoint.tensor_file import Rows
from autovaruna.config.files import at_home, copy_synced, read_record, system_bytes
from autovaruna.errors import CheckpointError
from autovaruna.ranks.world import World, gather_on_all, on_all, on_first

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.02
_LOCAL = "autovaruna-checkpoint-"
_UNIT_BYTES = 1 << 20  # to which copies are rounded up: a part may grow a little from save to save


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is saved."""

    keep: int | None = None  # how many checkpoints stay in the folder; None: all
    tempdir: str | None = None  # a local folder where files are written first
    is_shared: bool = True  # whether replicas share the writing
    in_background: bool = False  # whether training goes on meanwhile


def available_bytes() -> float:
    """Returns the memory of this host that programs can have; infinite where the system does not say."""
    return system_bytes("/proc/meminfo", "MemAvailable") or float("inf")


class HostMemory:
    """Memory on the host for a copy of a rank's part; one save after the other uses it. For CUDA it is pinned."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def missing_bytes(self, part: RankState) -> int:
        """Returns how much more memory a copy takes."""
        needed, is_on_cuda = _copy_size(part)
        if len(self._memory) >= needed:
            return 0
        return 1 << (needed - 1).bit_length() if is_on_cuda else needed  # torch pins powers of two

    def copy(self, part: RankState) -> dict[str, Rows]:
        """Returns the files of a part from memory that nobody changes until the next copy."""
        needed, is_on_cuda = _copy_size(part)
        if len(self._memory) < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first, so that there is no second one
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=is_on_cuda)
        copied: dict[str, Rows] = {}
        end = 0
        for name, rows in part.files.items():
            begin = end
            for row in rows:
                end += len(row)
                self._memory[end - len(row) : end].copy_(row, non_blocking=True)
            copied[name] = [self._memory[begin:end]]
        if is_on_cuda:
            torch.cuda.synchronize()
        return copied


def _copy_size(part: RankState) -> tuple[int, bool]:
    """Returns the bytes that a copy of a part takes, and whether some of the part is on a GPU."""
    rows = [row for rows in part.files.values() for row in rows]
    return -(-sum(map(len, rows)) // _UNIT_BYTES) * _UNIT_BYTES, any(row.is_cuda for row in rows)


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

    def save(
        self, subject: ModelInTraining, root: str | os.PathLike[str], content: Content, options: SaveOptions
    ) -> None:
        """Saves a checkpoint. Collective.

        Raises CheckpointError, on every rank, if it cannot be saved. What was there before is as it was.
        """
        self.wait()
        world, place = self._world, place_of(root)
        self._compare(place, content, options)
        tempdir = options.tempdir and os.path.abspath(at_home(options.tempdir))
        own = functools.partial(compose, subject, content, options.is_shared)
        part = on_all(world, own, "composing a checkpoint", fails_as=CheckpointError)
        copies = options.in_background and self._has_room(part)

        def begin() -> tuple[dict[str, bytes], Path]:
            files = config_files(subject.model)
            try:
                return files, folder.begin(Path(place).absolute(), content.step, self._locks)  # the script may go away
            except OSError as error:
                raise cannot_write(Path(place), error) from error

        extra_files, partial = on_first(world, begin, "beginning a checkpoint", fails_as=CheckpointError)

        def complete(parts: Sequence[WrittenPart]) -> None:
            path = commit(partial, content.step, parts, extra_files, options.keep)
            self._locks.close()  # others may read it from now on
            logger.info("saved the checkpoint %s", path)

        try:
            copy = functools.partial(self._ready, part, partial, copies)
            ready = on_all(world, copy, "copying a checkpoint", fails_as=CheckpointError)
            act = functools.partial(write_part, ready, partial, tempdir)
            if copies:
                if not self._is_watching_the_end:
                    self._is_watching_the_end = True
                    atexit.register(self._at_end, os.getpid())
                self._job = BackgroundWrite(partial, world, act, complete)
            else:
                parts = gather_on_all(world, act, "writing a checkpoint", fails_as=CheckpointError)
                on_first(world, lambda: complete(parts), "completing a checkpoint", fails_as=CheckpointError)
        except BaseException:
            if self._job is None:
                self._abandon(partial)
            raise

    def _ready(self, part: RankState, partial: Path, copies: bool) -> RankState:
        """Returns this rank's part, or a copy of it, once its mark is there."""
        try:
            mark_of(partial, self._world.rank).touch()
        except OSError as error:
            raise CheckpointError(
                f"rank {self._world.rank} cannot write to {partial}, which rank 0 has made: {error.strerror}. "
                "Expected a folder on a file system that all ranks share."
            ) from error
        return replace(part, files=self._memory.copy(part)) if copies else part

    def _compare(self, place: str, content: Content, options: SaveOptions) -> None:
        """Makes sure that the ranks save the same. Collective."""
        own = {"background": options.in_background, "shard": options.is_shared, "keep": options.keep}
        asked = {name: str(value) for name, value in {"step": content.step, **own}.items()}
        if found := different_requests(self._world, place, asked, "saving a checkpoint"):
            raise CheckpointError(f"The ranks save different checkpoints: {found}. Expected the same on every rank.")

    def _has_room(self, part: RankState) -> bool:
        """Says whether each host has memory for the copies of its ranks; the same on every rank. Collective."""
        own = self._memory.missing_bytes(part), available_bytes()
        needs = list(zip(self._world.hosts, self._world.gather_objects(own, "composing a checkpoint"), strict=True))
        missing = Counter[str]()
        for host, (num_bytes, _) in needs:
            missing[host] += num_bytes
        full = next(((host, available) for host, (_, available) in needs if missing[host] > available), None)
        if full is not None and self._world.rank == 0:
            host, available = full
            logger.warning(
                "save_checkpoint(background=True) first copies the state to memory of the host: that takes %.1f GB of "
                "%s, which has %.1f GB left. So training waits until the files are written",
                *(missing[host] / 1e9, host, available / 1e9),
            )
        return full is None

    def poll(self) -> None:
        """Ends the checkpoint in the background if all ranks are done, or one failed. Collective while `is_busy`.

        Raises CheckpointError if it failed, on this rank or another.
        """
        if self._job is None:
            return
        outcomes = self._world.gather_objects(self._job.outcome(), "a checkpoint in the background")
        if any(outcomes) or all(text == "" for text in outcomes):
            self._end(outcomes)

    def wait(self) -> None:
        """Waits until the checkpoint in the background is complete. Collective; raises as `poll`."""
        if self._job is not None:
            self._job.join()
            self.poll()

    def _end(self, outcomes: Sequence[str | None]) -> None:
        """Forgets the checkpoint in the background, which is complete, or of which a part has failed."""
        job = self._job
        assert job is not None
        job.join()
        self._job = None
        texts = self._world.gather_objects(job.outcome(), "the end of a checkpoint in the background")
        if any(texts):
            self._abandon(job.folder)
        own = [text for text in texts if text and "it says why" not in text]
        if first := next(iter(own or [text for text in outcomes if text]), ""):
            raise CheckpointError(f"The checkpoint in the background failed: {first}") from job.error

    def _abandon(self, partial: Path) -> None:
        """Removes what was written of a checkpoint when no rank writes any more."""
        if self._world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        self._locks.close()

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


@dataclass
class BackgroundWrite:
    """A checkpoint on its way: a thread of this rank writes its part into `folder`, where every rank has its mark."""

    folder: Path
    world: World
    write: Callable[[], WrittenPart]
    complete: Callable[[Sequence[WrittenPart]], None]
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"autovaruna checkpoint {self.folder.name}")
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives no more threads: the other ranks must hear of it, too
            self._fail(error)

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def outcome(self) -> str | None:
        """Returns None while it is at work, an empty text if it is done, else what went wrong."""
        if self._thread.is_alive():
            return None
        return "" if self.error is None else str(self.error)

    def _run(self) -> None:
        try:
            self._report(self.write())
            if self.world.rank == 0:
                self.complete([self._part_of(rank) for rank in range(self.world.num_ranks)])
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        logger.error("the checkpoint %s failed: %s", self.folder, error)
        mark_of(self.folder, self.world.rank).unlink(missing_ok=True)

    def _report(self, part: WrittenPart) -> None:
        """Puts the record of this rank's part into its mark, whole or not at all."""
        mark = mark_of(self.folder, self.world.rank)
        try:
            mark.with_suffix(".part").write_text(json.dumps(asdict(part)))
            os.replace(mark.with_suffix(".part"), mark)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def _part_of(self, rank: int) -> WrittenPart:
        """Waits for the record of a rank's part."""
        try:
            while not (text := mark_of(self.folder, rank).read_text()):
                time.sleep(POLL_SECONDS)
        except OSError as error:
            raise CheckpointError(
                f"rank {rank} could not write its part of the checkpoint {self.folder.name}; it says why."
            ) from error
        return read_record(json.loads(text), WrittenPart)


def write_part(part: RankState, partial: Path, tempdir: str | None) -> WrittenPart:
    """Writes the files of a rank to the disk, first to `tempdir` if there is one; CheckpointError if it cannot."""
    records = {}
    for name, rows in part.files.items():
        place = Path(tempdir or partial / name)
        try:
            if tempdir is None:
                records[name] = write_file(place, chunks_of(rows))
            else:
                with _local_folder(place) as local:
                    records[name] = write_file(local / name, chunks_of(rows), syncs=False)
                    place = partial / name
                    copy_synced(local / name, place)
        except OSError as error:
            raise cannot_write(place, error) from error
    return WrittenPart(records, part.weights, part.num_weight_bytes, part.documents)


def chunks_of(rows: Rows) -> Iterator[Bytes]:
    """Yields the chunks of a file; what lies in one row on the host is not copied."""
    if 0 < sum(row.numel() for row in rows) <= CHUNK_BYTES and len({row.device for row in rows}) == 1:
        yield torch.cat(list(rows)).cpu().numpy()  # in one call: many are small
        return
    pieces: list[Bytes] = []
    size = 0
    for row in rows:
        begin, end = 0, row.numel()
        while begin < end:
            piece = row[begin : begin + CHUNK_BYTES - size].cpu().numpy()
            pieces.append(piece)
            begin, size = begin + len(piece), size + len(piece)
            if size == CHUNK_BYTES:
                yield pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
                pieces, size = [], 0
    if pieces:
        yield np.concatenate(pieces)


@contextmanager
def _local_folder(tempdir: Path) -> Iterator[Path]:
    """Makes a folder in a temporary one, and takes away those that killed jobs have left there."""
    with ExitStack() as stack:
        with folder.lock(tempdir, waits=True):
            for entry in os.scandir(tempdir):
                if entry.name.startswith(_LOCAL) and entry.is_dir():
                    folder.remove_unlocked(Path(entry.path))
            local = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_LOCAL, dir=tempdir)))
            stack.enter_context(folder.lock(local))
        yield local
