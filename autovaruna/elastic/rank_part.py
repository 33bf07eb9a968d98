"""What a rank leaves of a snapshot in memory of its host: files in one of two places, and a `RankPart` that names them.

A part is complete once its record is there; it is written last, and removed first. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from autovaruna.checkpoint.manifest import MANIFEST, Manifest, WrittenPart, index_and_state
from autovaruna.config.files import read_record

LEAVE, HOLD, COPIED = "leave", "hold", "copied"
"""Files by which a keeper tells its ranks to end at a step's border, to write nothing now, and what step others have
copies of."""
PINNED = "pinned"  # the folder where a keeper has links to what is written to disk
RECORD = "part.json"
_SLOTS = ("slot-0", "slot-1")


@dataclass(frozen=True)
class RankPart(WrittenPart):
    """What a rank has written of a snapshot."""

    step: int
    rank: int
    num_ranks: int
    extra_files: Mapping[str, str]  # texts of files that are the same whatever the ranks are; rank 0's alone

    def is_intact(self, slot: Path) -> bool:
        """Says whether the files in a place are those that were written."""
        try:
            return not Manifest(self.step, self.files).damages(slot)
        except Exception:  # files that cannot be read are of no use either
            return False


def read_part(slot: Path) -> RankPart | None:
    """Returns what a place for snapshots holds; None: nothing that is complete."""
    try:
        return read_record(json.loads((slot / RECORD).read_bytes()), RankPart)
    except (OSError, ValueError):
        return None


def write_record(slot: Path, part: RankPart) -> None:
    """Makes a part complete whose files are there."""
    new = slot / f".{RECORD}"
    new.write_bytes(msgspec.json.encode(part))
    os.replace(new, slot / RECORD)


def clear_slot(slot: Path, names: Container[str]) -> None:
    """Makes a place ready for a part: what it holds is no longer complete, and files of these names are overwritten.

    A file that has another link, as while a checkpoint is written, stays as it is there: a new one takes its place.
    """
    slot.mkdir(parents=True, exist_ok=True, mode=0o700)
    (slot / RECORD).unlink(missing_ok=True)
    for path in slot.iterdir():
        if path.name not in names or path.stat().st_nlink > 1:
            path.unlink()


def slots_of(rank_folder: Path) -> list[Path]:
    """Returns the places of a rank's snapshots."""
    return [rank_folder / name for name in _SLOTS]


def small_files(parts: Sequence[RankPart]) -> dict[str, str]:
    """Returns the texts of the files that make the parts of all ranks a checkpoint."""
    records = {name: record for part in parts for name, record in part.files.items()}
    manifest = {MANIFEST: Manifest(parts[0].step, records).to_json()}
    return index_and_state(parts) | manifest | {name: text for part in parts for name, text in part.extra_files.items()}
