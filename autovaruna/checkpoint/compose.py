"""Decides what each rank writes, and turns everything beside the weights into documents and tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autovaruna.checkpoint.document import encode
from autovaruna.checkpoint.optimizer_state import encode_groups, encode_state
from autovaruna.checkpoint.part import Part
from autovaruna.checkpoint.subject import Subject, writers
from autovaruna.errors import CheckpointError


@dataclass(frozen=True)
class Content:
    """What goes into a checkpoint beside model and optimizer.

    Attributes:
        step: number of the checkpoint.
        data_position: where the data go on.
        extra: the user's own dict.
        scaler: a GradScaler.
        lr_scheduler: a schedule of the learning rate.
    """

    step: int
    data_position: Any = None
    extra: Any = None
    scaler: Any = None
    lr_scheduler: Any = None


def compose(subject: Subject, content: Content, is_shared: bool) -> Part:
    """Returns the part of this rank.

    Raises:
        CheckpointError: something is of a type that no checkpoint can hold, or has no numbers yet.
    """
    rank = subject.world.rank
    tensors, module_state = subject.entries()
    writer = writers(subject, tensors, is_shared)
    own_files = sorted(set(writer.values()) or {0})
    others: dict[str, Tensor] = {}
    documents: dict[str, Any] = {"generators": {str(rank): encode(_generators(), f"rng.{rank}", others)}}
    if subject.optimizer is not None:
        first = {subject.state.first_name[name]: place for name, place in writer.items()}
        documents["optimizer_state"] = encode_state(
            subject.optimizer, subject, lambda name: first.get(name, 0) == rank, others
        )
    if rank == 0:
        documents |= _of_first_rank(subject, content, others)
        documents["ties"] = {name: first for name, first in subject.first_names(tensors).items() if name != first}
        documents["module_state"] = encode(module_state, "module_state", others)
    place = own_files.index(rank) + 1 if rank in own_files else 0
    weights = {name: tensors[name] for name, its_writer in writer.items() if its_writer == rank}
    if empty := [name for name, tensor in weights.items() if tensor.is_meta]:
        raise CheckpointError(
            f"{empty[0]} and {len(empty) - 1} others are on meta, where tensors have no numbers: got save_checkpoint "
            "before the first call, which gives them some. Call the model first, or load weights."
        )
    return Part(
        weights=weights,
        others=others,
        documents=documents,
        weight_file=f"model-{place:05d}-of-{len(own_files):05d}.safetensors",
        other_file=f"state-{rank + 1:05d}-of-{subject.world.num_ranks:05d}.safetensors",
    )


def _of_first_rank(subject: Subject, content: Content, others: dict[str, Tensor]) -> dict[str, Any]:
    """Returns what is the same on every rank, beside the model."""
    found: dict[str, Any] = {
        "step": content.step,
        "data_position": encode(content.data_position, "data_position", others),
        "extra": encode(content.extra, "extra", others),
        "seed": subject.seed,
        "num_calls": subject.num_calls,
    }
    if subject.optimizer is not None:
        found["optimizer"] = encode_groups(subject.optimizer, others)
    for name, part in (("scaler", content.scaler), ("lr_scheduler", content.lr_scheduler)):
        if part is not None:
            found[name] = encode(part.state_dict(), name, others)
    return found


def _generators() -> dict[str, Tensor]:
    """Returns the states of the generators that a plain model draws from on this rank."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def config_files(model: Any) -> dict[str, bytes]:
    """Returns ``config.json`` and the like, if the model has such a configuration."""
    found: dict[str, bytes] = {}
    for name in ("config", "generation_config"):
        save = getattr(getattr(model, name, None), "save_pretrained", None)
        if callable(save):
            found |= _files_of(save)
    return found


def _files_of(save: Any) -> Mapping[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="autovaruna-") as directory:
        save(directory)
        return {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.is_file()}
