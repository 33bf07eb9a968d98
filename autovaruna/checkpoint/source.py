"""Opens what weights can be loaded from: our checkpoints, folders as Hugging Face's tools write them, single files."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autovaruna.checkpoint.commit import INDEX, STATE, STATE_VERSION
from autovaruna.checkpoint.manifest import MANIFEST, read_manifest
from autovaruna.checkpoint.state_shape import check_state
from autovaruna.checkpoint.tensor_file import Entry, read_header
from autovaruna.errors import CheckpointError
from autovaruna.json_text import parse

SINGLE = "model.safetensors"
OTHERS = "state-*.safetensors"


@dataclass(frozen=True)
class Source:
    """Tensors that can be read.

    Attributes:
        path: the folder or file.
        weights: where each weight is, by name.
        others: where all other tensors are.
        ties: names that are tied to one of `weights`, and to which.
        state: what ``state.json`` says; None: weights are all there is.
    """

    path: Path
    weights: Mapping[str, Entry]
    others: Mapping[str, Entry] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] | None = None


def open_source(path: Path) -> Source:
    """Opens a checkpoint of ours, a Hugging Face folder, or a safetensors file; reads headers alone.

    Raises:
        CheckpointError: there is none, or its files do not fit together.
    """
    if path.is_file():
        return _from_files(path, [path])
    if (path / MANIFEST).exists():
        return _from_index(path)
    if (path / STATE).exists() and any(path.glob(OTHERS)):
        raise CheckpointError(
            f"{path / MANIFEST} is missing, so that nobody can say whether the checkpoint is complete. Load another, "
            f"or copy it again from where it is intact. (Its weights alone load from a copy without {STATE}.)"
        )
    if (path / SINGLE).exists():  # first, as the library transformers does
        return _from_files(path, [path / SINGLE])
    if (path / INDEX).exists():
        return _from_index(path)
    there = sorted(each.name for each in path.iterdir())[:8] if path.is_dir() else []
    raise CheckpointError(
        f"There is no checkpoint in {path}: got {', '.join(there) or 'nothing'}. Expected folders step-... as "
        f"save_checkpoint makes them, {SINGLE}, {INDEX}, or a safetensors file. (Pickled files (.bin, .pt) are never "
        "read: convert them with safetensors.)"
    )


def _from_index(path: Path) -> Source:
    index = _json(path / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path / INDEX} has no weight_map; expected the file of each weight, by name.")
    names = list(dict.fromkeys(weight_map.values()))
    known = read_manifest(path).files if (path / MANIFEST).exists() else None
    outside = [name for name in names if (_is_outside(name) if known is None else name not in known)]
    if outside:
        raise CheckpointError(
            f"{path / INDEX} tells of {outside[0]!r}, which is no file of {path}; expected names of files in that "
            "folder. Nothing outside it is read."
        )
    source = _from_files(path, [path / name for name in names])
    absent = [name for name, file in weight_map.items() if name not in source.weights]
    if absent:
        raise CheckpointError(
            f"{path / INDEX} tells of {', '.join(absent[:3])} in {weight_map[absent[0]]}, which has no such tensor."
        )
    if known is None:
        return source
    state = _state(path / STATE)
    others: dict[str, Entry] = {}
    for name in fnmatch.filter(known, OTHERS):
        others |= read_header(path / name)[0]
    check_state(path / STATE, state, others)
    return Source(path, source.weights, others, state["ties"], state)


def _is_outside(name: str) -> bool:
    return Path(name).is_absolute() or ".." in Path(name).parts


def _state(path: Path) -> dict[str, Any]:
    state = _json(path)
    version = state.get("format_version") if isinstance(state, dict) else None
    if version != STATE_VERSION:
        raise CheckpointError(
            f"{path} has format_version {version}; expected {STATE_VERSION}. Load it with the version of autovaruna "
            "that wrote it."
        )
    return dict(state)


def _from_files(path: Path, files: list[Path]) -> Source:
    weights: dict[str, Entry] = {}
    ties: dict[str, str] = {}
    for file in files:
        entries, metadata = read_header(file)
        weights |= entries
        ties |= metadata  # safetensors' own save_model notes tied names there
    return Source(path, weights, ties={name: kept for name, kept in ties.items() if kept in weights})


def _json(path: Path) -> Any:
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
