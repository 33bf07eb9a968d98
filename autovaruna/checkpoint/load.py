"""Loads a rank's part of a checkpoint, once everything has been compared; also into plain PyTorch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.checkpoint.encoding import decode
from autovaruna.checkpoint.source import CheckpointSource, choose
from autovaruna.checkpoint.state import ModelInTraining, check_optimizer, load_optimizer
from autovaruna.checkpoint.tensor_file import Entry, Reader, can_become, read_all, read_new
from autovaruna.errors import AutoVarunaError, CheckpointError
from autovaruna.ranks.environment import single_world
from autovaruna.runtime.optimizer import CutOptimizer
from autovaruna.runtime.weights import OwnedState, materialize

_MOST_NAMES = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint has beside model and optimizer; most is as it was given to ``save_checkpoint``."""

    path: Path  # what was loaded
    step: int | None = None  # None: it was none of ours
    data_position: Any = None
    extra: Any = None


class Loading:
    """A checkpoint that is being loaded; `scaler` and `lr_scheduler` get the states that it has of such."""

    def __init__(self, source: CheckpointSource, scaler: Any = None, lr_scheduler: Any = None) -> None:
        self.source = source
        self._parts = {"scaler": scaler, "lr_scheduler": lr_scheduler}
        self.state = source.state or {}

    def check(self, subject: ModelInTraining, is_strict: bool) -> None:
        """Makes sure, before anything changes, that names, shapes and the optimizer fit; CheckpointError if not."""
        self.source = _by_names_of(self.source, subject)
        problems = self._misfits(subject, is_strict)
        optimizer = self.state.get("optimizer")
        if subject.optimizer is not None and optimizer is not None:
            problems += check_optimizer(subject, subject.optimizer, optimizer)
        for name, part in self._parts.items():
            if part is not None and name not in self.state:
                problems.append(f"it was saved without {name}=")
        if problems:
            raise CheckpointError(
                f"{self.source.path} does not fit the model: {'; '.join(problems)}. Nothing has been changed."
            )

    def remark(self, subject: ModelInTraining) -> None:
        """Warns of what a user may have forgotten, and of what changes on the way."""
        for text in self._remarks(subject):
            logger.warning("loading %s: %s", self.source.path, text)

    def _remarks(self, subject: ModelInTraining) -> list[str]:
        pairs = [(self._entry(name), tensor.dtype) for name, tensor in subject.tensors().items()]
        others = {entry.dtype for entry, dtype in pairs if entry and entry.dtype != dtype}
        found = [f"weights of {dtype} become those of the model's own dtype" for dtype in sorted(others, key=str)]
        for name, part in self._parts.items():
            if part is None and name in self.state:
                found.append(f"it holds the state of a {name}, which load_checkpoint got none for: give it {name}=")
        chosen = self.names(subject)
        for name, first in subject.state.first_name.items():
            entry, taken = self.source.weights.get(name), chosen.get(first)
            if entry and taken and not _is_same(entry, taken):
                found.append(
                    f"{name} and {taken.name} have other numbers there, but are one tensor of the model: those of "
                    f"{taken.name} are taken"
                )
        if self.state and subject.optimizer is not None and "optimizer" not in self.state:
            found.append("it was saved without an optimizer: the optimizer goes on with what state it has")
        return found

    def names(self, subject: ModelInTraining) -> dict[str, Entry]:
        """Returns where the tensors of the model are read from, by first name."""
        found: dict[str, Entry] = {}
        for name in subject.tensors():
            entry = self._entry(name)
            first = subject.state.first_name[name]
            if entry is not None and (first not in found or name == first):
                found[first] = entry
        return found

    def load_weights(self, subject: ModelInTraining) -> None:
        """Overwrites the parameters and buffers that this rank holds."""
        entries = self.names(subject)
        pairs = [(entry, subject.state.tensor(name)) for name, entry in entries.items()]
        read_all([(entry, tensor) for entry, tensor in pairs if not tensor.is_meta])
        others = decode(self.state.get("module_state", {}), self._read)
        if others:
            with self._blaming("module_state"):
                subject.model.load_state_dict(others, strict=False)

    def load_optimizer(self, subject: ModelInTraining, with_state: bool = True) -> None:
        """Gives the optimizer its groups' options and, if wanted, the state of what this rank holds."""
        known = self.state.get("optimizer")
        if subject.optimizer is not None and known is not None:
            state = self.state.get("optimizer_state", {}) if with_state else {}
            dtypes = {name: entry.dtype for name, entry in self.names(subject).items()}
            reader = Reader(self.source.others)
            with self._blaming("optimizer"):
                load_optimizer(subject, subject.optimizer, known, state, reader, dtypes)

    def load_rest(self, rank: int) -> CheckpointInfo:
        """Gives scaler, schedule and generators their states, and returns the rest."""
        for name, part in self._parts.items():
            if part is not None:
                with self._blaming(name):
                    part.load_state_dict(decode(self.state[name], self._read))
        generators = decode(self.state.get("generators", {}).get(str(rank), {}), self._read)
        with self._blaming("generators"):
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

    @contextmanager
    def _blaming(self, what: str) -> Iterator[None]:
        """Names the checkpoint, and what it holds a state of, in the error of whoever cannot load that state."""
        try:
            yield
        except AutoVarunaError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"The state of {what} in {self.source.path} cannot be loaded: {type(error).__name__}: {error!s:.300}. "
                "Some of the rest has been loaded; load another step."
            ) from error

    def _read(self, name: str) -> Tensor:
        return read_new(self.source.others[name])

    def _entry(self, name: str) -> Entry | None:
        return self.source.weights.get(name) or self.source.weights.get(self.source.ties.get(name, ""))

    def _misfits(self, subject: ModelInTraining, is_strict: bool) -> list[str]:
        tensors = subject.tensors()
        found = self.names(subject)
        odd = [
            f"{name} has shape {entry.shape} and {entry.dtype}, expected {tuple(tensor.shape)} and {tensor.dtype}"
            for name, tensor in tensors.items()
            for entry in [self._entry(name)]
            if entry is not None and (entry.shape != tuple(tensor.shape) or not can_become(entry.dtype, tensor.dtype))
        ]
        problems = [_some(odd, "; ")] if odd else []
        missing = [name for name in tensors if subject.state.first_name[name] not in found]
        unexpected = [name for name in self.source.weights if name not in tensors]
        if tensors and not found and not is_strict:
            problems.append(f"none of its names is one of the model's: got {_some(unexpected)}")
        if is_strict and missing:
            problems.append(f"missing: {_some(missing)}")
        if is_strict and unexpected:
            problems.append(f"not expected: {_some(unexpected)}{_hint(missing, unexpected)}")
        return problems


def _is_same(one: Entry, other: Entry) -> bool:
    return one == other or (one.dtype == other.dtype and torch.equal(read_new(one), read_new(other)))


def _some(names: Iterable[str], between: str = ", ") -> str:
    every = list(names)
    more = f" and {len(every) - _MOST_NAMES} more" if len(every) > _MOST_NAMES else ""
    return between.join(every[:_MOST_NAMES]) + more


def _hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Says so if names differ by what they begin with, as those of a model in a wrapper do."""
    for longer, shorter, words in ((unexpected, missing, "has"), (missing, unexpected, "lacks")):
        first = min(longer, default="")
        begins = [first[: -len(name)] for name in shorter if first.endswith(f".{name}")]
        if begins and {f"{begins[0]}{name}" for name in shorter} == set(longer):
            return f" (it {words} {begins[0]!r} in front of each name: rename them in the file)"
    return ""


def _by_names_of(source: CheckpointSource, subject: ModelInTraining) -> CheckpointSource:
    """Returns a source whose weights have the model's names, where they differ by the name of a base model alone.

    A model of the library transformers with a head holds a base model under a name, its ``base_model_prefix``. A file
    may be of either, as in that library: names of the one begin with it, names of the other do not.
    """
    base, names = getattr(subject.model, "base_model_prefix", ""), subject.tensors()
    if not isinstance(base, str) or not base or source.state is not None:
        return source
    begin = f"{base}."
    is_with_head = any(name.startswith(begin) for name in names)
    if is_with_head == any(name.startswith(begin) for name in source.weights):
        return source

    def renamed(name: str) -> str:
        if is_with_head:
            return begin + name if name not in names and begin + name in names else name
        return name.removeprefix(begin)

    return replace(
        source,
        weights={renamed(name): entry for name, entry in source.weights.items()},
        ties={renamed(name): renamed(kept) for name, kept in source.ties.items()},
    )


def load_checkpoint(
    dir: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | str = "latest",
    scaler: Any = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> CheckpointInfo:
    """Loads a checkpoint into a plain model, on this process alone; returns what was saved beside the weights.

    Args:
        dir: A folder of checkpoints, one of them, a Hugging Face folder, or a safetensors file.
        model: The model; parameters on ``meta`` get memory on the host.
        step: The step, or ``"latest"``: the newest that is intact.
        strict: Whether every name of the model, and no other, must be there.

    Raises:
        CheckpointError: there is none that is intact, or it does not fit; nothing has been changed.
    """
    world = single_world()
    state = OwnedState(model)
    names = {id(state.tensor(name)): name for name in state.places}
    subject = ModelInTraining(world, state, optimizer=None if optimizer is None else CutOptimizer(optimizer, names))
    with ExitStack() as locks:
        loading = Loading(choose(world, dir, step, locks), scaler, lr_scheduler)
        loading.check(subject, strict)
        loading.remark(subject)
        load_all(loading, subject, torch.device("cpu"))
        return loading.load_rest(world.rank)


def load_all(loading: Loading, subject: ModelInTraining, device: torch.device) -> None:
    """Loads weights and optimizer where one process has the whole model; what is on ``meta`` gets memory."""
    state = subject.state
    if any(state.tensor(name).is_meta for name in state.places):
        materialize(state, state.places, device, 0, given=loading.names(subject))
        if subject.optimizer is not None:
            subject.optimizer.cut(state.parameters())
    loading.load_weights(subject)
    loading.load_optimizer(subject)
