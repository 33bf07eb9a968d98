"""Completes a checkpoint whose parts are written: index, state, manifest, and its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autovaruna.checkpoint import folder
from autovaruna.checkpoint.checksum import checksums
from autovaruna.checkpoint.manifest import MANIFEST, FileRecord, Manifest, sync_folder, write_synced
from autovaruna.checkpoint.part import Report, cannot_write

INDEX = "model.safetensors.index.json"
STATE = "state.json"
STATE_VERSION = 1
PER_RANK = ("optimizer_state", "generators")
"""What ``state.json`` has from every rank."""


def commit(
    partial: Path, step: int, reports: Sequence[Report], extra_files: Mapping[str, bytes], keep: int | None
) -> Path:
    """Writes what is still missing, gives the checkpoint its name, and then removes old ones.

    Args:
        partial: The folder that the ranks have written to.
        step: Its step.
        reports: What they have written, by rank.
        extra_files: More small files, by name.
        keep: How many checkpoints stay; None: all.

    Returns:
        The folder of the complete checkpoint.

    Raises:
        CheckpointError: something cannot be written.
    """
    try:
        small = {INDEX: _json(_index(reports)), STATE: _json(_state(reports)), **extra_files}
        records = {name: FileRecord(len(data), checksums(data)) for name, data in small.items()}
        for report in reports:
            records |= report.files
        small[MANIFEST] = Manifest(step, records).to_json().encode()
        write_synced({partial / name: data for name, data in small.items()})
        sync_folder(partial)
        complete = folder.finish(partial, step)
        folder.remove_old(complete, keep)
        return complete
    except OSError as error:
        raise cannot_write(partial, error) from error


def _index(reports: Sequence[Report]) -> dict[str, Any]:
    weight_map = {name: file for report in reports for name, file in report.weight_map.items()}
    return {
        "metadata": {"total_size": sum(report.num_bytes for report in reports)},
        "weight_map": dict(sorted(weight_map.items())),
    }


def _state(reports: Sequence[Report]) -> dict[str, Any]:
    state: dict[str, Any] = {"format_version": STATE_VERSION}
    for report in reports:
        for key, content in report.documents.items():
            if key in PER_RANK:
                state.setdefault(key, {}).update(content)
            else:
                state[key] = content
    return state


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1, allow_nan=False).encode()
