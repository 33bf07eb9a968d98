"""Names the checkpoints of a run: each step has a folder of its own, which appears when it is complete.

root/
  step-00000300/       complete: it has a manifest
  step-00000300.1/     the same step, saved again; it replaces the one above
  .step-00000400.x7ab/ on its way, or left behind by a run that was killed
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from autovaruna.checkpoint.manifest import MANIFEST, sync_folder

_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_PARTIAL = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}")


@dataclass(frozen=True, order=True)
class Saved:
    """A complete checkpoint; the last in order is the newest."""

    step: int
    edition: int
    path: Path


def saved_in(root: Path) -> list[Saved]:
    """Returns the complete checkpoints in a folder, the newest first.

    Raises:
        OSError: the folder cannot be read.
    """
    found = []
    for entry in os.scandir(root):
        match = _COMPLETE.fullmatch(entry.name)
        if match and (Path(entry.path) / MANIFEST).exists():
            found.append(Saved(int(match[1]), int(match[2] or 0), Path(entry.path)))
    return sorted(found, reverse=True)


def begin(root: Path, step: int) -> Path:
    """Makes the folder that a checkpoint is written to, and removes what killed runs have left behind.

    Raises:
        OSError: it cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    remove_partial(root)
    path = _partial_path(root, step)
    path.mkdir()
    return path


def _partial_path(root: Path, step: int) -> Path:
    return root / f".step-{step:08d}.{secrets.token_hex(4)}"


def remove_partial(root: Path) -> None:
    """Removes checkpoints that were never completed."""
    for entry in os.scandir(root):
        if _PARTIAL.fullmatch(entry.name):
            shutil.rmtree(entry.path, ignore_errors=True)


def finish(partial: Path, step: int) -> Path:
    """Gives a checkpoint, all of which is on the disk, its name: from now on it is there. Returns its folder."""
    root = partial.parent
    editions = [saved.edition for saved in saved_in(root) if saved.step == step]
    edition = max(editions) + 1 if editions else 0
    while True:
        path = root / (f"step-{step:08d}.{edition}" if edition else f"step-{step:08d}")
        if not path.exists():
            break
        edition += 1
    os.rename(partial, path)
    sync_folder(root)
    return path


def remove_old(newest: Path, keep: int | None) -> None:
    """Removes other editions of the newest step, and all but the last `keep` checkpoints."""
    every = saved_in(newest.parent)
    step = next(saved.step for saved in every if saved.path == newest)
    others = [saved for saved in every if saved.step != step]
    doomed = [saved for saved in every if saved.step == step and saved.path != newest]
    for saved in doomed + (others[keep - 1 :] if keep else []):
        remove(saved)


def remove(saved: Saved) -> None:
    """Removes a checkpoint: its name first, so that what is left is never taken for a complete one."""
    doomed = _partial_path(saved.path.parent, saved.step)
    os.rename(saved.path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
