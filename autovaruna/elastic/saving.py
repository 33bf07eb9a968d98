"""Writes a state that hosts have in memory to disk as a checkpoint, while their ranks go on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from autovaruna.checkpoint import folder
from autovaruna.checkpoint.save import Report, commit
from autovaruna.elastic.link import Link
from autovaruna.elastic.snapshots import State

_WRITE_SECONDS = 3600.0


def save(state: State, links: Mapping[str, Link], root: str, keep: int = 2) -> Path:
    """Writes a checkpoint and returns its folder.

    Args:
        state: What is written; nobody changes it meanwhile.
        links: The hosts that have it, by name.
        root: A folder that they all share.
        keep: How many checkpoints stay there.

    Raises:
        OSError, CheckpointError: it cannot be written.
    """
    chosen = [held[0] for _, held in sorted(state.held.items())]
    with ExitStack() as locks:
        partial = folder.begin(Path(root).absolute(), state.step, locks)
        asked = []
        for host in {held.host for held in chosen}:
            places = [held.place for held in chosen if held.host == host]
            asked.append(links[host].ask("save", places=places, partial=os.fspath(partial)))
        for answer in asked:
            answer.result(_WRITE_SECONDS)
        reports = [Report(held.part.files, held.part.documents) for held in chosen]
        texts = {name: text.encode() for held in chosen for name, text in held.part.extra_files.items()}
        return commit(partial, state.step, reports, texts, keep)
