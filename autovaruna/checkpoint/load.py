"""Loads a rank's part of a checkpoint: first everything is compared, then everything is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autovaruna.checkpoint.document import decode
from autovaruna.checkpoint.optimizer_state import check_optimizer, load_optimizer
from autovaruna.checkpoint.read import Reader, read_all, read_new
from autovaruna.checkpoint.source import Source
from autovaruna.checkpoint.subject import Subject
from autovaruna.checkpoint.tensor_file import Entry
from autovaruna.errors import CheckpointError

_MOST_NAMES = 8


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint has beside the state of model and optimizer.

    Attributes:
        path: what was loaded.
        step: its step; None: it was none of ours.
        data_position: as it was given to ``save_checkpoint``.
        extra: as it was given to ``save_checkpoint``.
    """

    path: Path
    step: int | None = None
    data_position: Any = None
    extra: Any = None


class Loading:
    """A checkpoint that is being loaded.

    Args:
        source: The checkpoint, intact.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.state = source.state or {}

    def check(self, subject: Subject, is_strict: bool, scaler: Any = None, lr_scheduler: Any = None) -> None:
        """Makes sure that everything fits, before anything is changed.

        Raises:
            CheckpointError: names are missing or not expected, shapes or dtypes differ, or the optimizer is another.
        """
        problems = self._misfits(subject, is_strict)
        optimizer = self.state.get("optimizer")
        if subject.optimizer is not None and optimizer is not None:
            subject.optimizer.check()
            problems += check_optimizer(subject.optimizer, optimizer, lambda name: _first(subject, name))
        for name, part in (("scaler", scaler), ("lr_scheduler", lr_scheduler)):
            if part is not None and name not in self.state:
                problems.append(f"it was saved without {name}=")
        if problems:
            raise CheckpointError(
                f"{self.source.path} does not fit the model: {'; '.join(problems)}. Nothing has been changed."
            )

    def names(self, subject: Subject) -> dict[str, Entry]:
        """Returns where the tensors of the model are read from, by first name."""
        found: dict[str, Entry] = {}
        for name in subject.tensors():
            entry = self._entry(name)
            first = subject.state.first_name[name]
            if entry is not None and (first not in found or name == first):
                found[first] = entry
        return found

    def load_weights(self, subject: Subject) -> None:
        """Overwrites the parameters and buffers that this rank holds."""
        entries = self.names(subject)
        pairs = [(entry, subject.state.tensor(name)) for name, entry in entries.items()]
        read_all([(entry, tensor) for entry, tensor in pairs if not tensor.is_meta])
        others = decode(self.state.get("module_state", {}), self._read)
        if others:
            subject.model.load_state_dict(others, strict=False)

    def load_optimizer(self, subject: Subject, with_state: bool = True) -> None:
        """Gives the optimizer its groups' options and, if wanted, the state of what this rank holds."""
        known = self.state.get("optimizer")
        if subject.optimizer is not None and known is not None:
            state = self.state.get("optimizer_state", {}) if with_state else {}
            load_optimizer(subject, known, state, lambda name: _first(subject, name), Reader(self.source.others))

    def load_rest(self, rank: int, scaler: Any = None, lr_scheduler: Any = None) -> CheckpointInfo:
        """Gives scaler, schedule and generators their states, and returns the rest."""
        for name, part in (("scaler", scaler), ("lr_scheduler", lr_scheduler)):
            if part is not None:
                part.load_state_dict(decode(self.state[name], self._read))
        generators = decode(self.state.get("generators", {}).get(str(rank), {}), self._read)
        if "cpu" in generators:
            torch.set_rng_state(generators["cpu"])
        if "cuda" in generators and torch.cuda.is_available():
            torch.cuda.set_rng_state(generators["cuda"])
        return CheckpointInfo(
            self.source.path,
            self.state.get("step"),
            decode(self.state.get("data_position"), self._read),
            decode(self.state.get("extra"), self._read),
        )

    def _read(self, name: str) -> Tensor:
        return read_new(self.source.others[name])

    def _entry(self, name: str) -> Entry | None:
        return self.source.weights.get(name) or self.source.weights.get(self.source.ties.get(name, ""))

    def _misfits(self, subject: Subject, is_strict: bool) -> list[str]:
        tensors = subject.tensors()
        found = self.names(subject)
        problems = [
            f"{name} has shape {entry.shape} and {entry.dtype}, expected {tuple(tensor.shape)} and {tensor.dtype}"
            for name, tensor in tensors.items()
            for entry in [self._entry(name)]
            if entry is not None and (entry.shape != tuple(tensor.shape) or entry.dtype != tensor.dtype)
        ]
        missing = [name for name in tensors if subject.state.first_name[name] not in found]
        unexpected = [name for name in self.source.weights if name not in tensors]
        if is_strict and missing:
            problems.append(f"missing: {_some(missing)}")
        if is_strict and unexpected:
            problems.append(f"not expected: {_some(unexpected)}")
        return problems


def _first(subject: Subject, name: str) -> str:
    return subject.state.first_name.get(name, name)


def _some(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _MOST_NAMES} more" if len(every) > _MOST_NAMES else ""
    return ", ".join(every[:_MOST_NAMES]) + more
