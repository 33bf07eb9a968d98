"""Finds what is loaded: the newest checkpoint that is intact, a folder of Hugging Face's tools, or a single file."""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch

from autovaruna.checkpoint import folder
from autovaruna.checkpoint.encoding import decode
from autovaruna.checkpoint.folder import Saved
from autovaruna.checkpoint.manifest import INDEX, MANIFEST, STATE, NotDamagedError, read_manifest
from autovaruna.checkpoint.tensor_file import Entry, read_header
from autovaruna.config.files import Whole, parse, read_record
from autovaruna.config.settings import is_whole
from autovaruna.errors import CheckpointError
from autovaruna.ranks.world import World, gather_on_all, on_all, on_first

SINGLE = "model.safetensors"
OTHERS = "state-*.safetensors"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointSource:
    """Tensors that can be read."""

    path: Path
    weights: Mapping[str, Entry]  # where each weight is, by name
    others: Mapping[str, Entry] = field(default_factory=dict)  # where all other tensors are
    ties: Mapping[str, str] = field(default_factory=dict)  # names that are tied to one of `weights`, and to which
    state: Mapping[str, Any] | None = None  # what ``state.json`` says; None: weights are all there is


def choose(world: World, root: str | os.PathLike[str], step: int | str, locks: ExitStack) -> CheckpointSource:
    """Returns a checkpoint that is intact, as for ``load_checkpoint``; the ranks share the checking. Collective.

    `locks` keeps another job that saves from removing it, until it is closed. Raises CheckpointError if there is none,
    with what is damaged, and how, or if the ranks ask for different ones.
    """
    path = Path(folder.place_of(root))
    step = int(step) if is_whole(step) else step
    if found := folder.different_requests(world, str(path), {"step": repr(step)}, "looking for checkpoints"):
        raise CheckpointError(f"The ranks load different checkpoints: {found}. Expected the same on every rank.")
    if world.rank == 0 and (other := folder.other_job(path)):
        logger.info("another job saves to %s (%s): this one can load from there, but not save", path, other)
    known: dict[Path, list[str]] = {}
    while True:
        what, next_best = "looking for checkpoints", partial(_next_best, path, step, known, locks)
        chosen = on_first(world, next_best, what, fails_as=CheckpointError)
        if chosen is None:
            return on_all(world, lambda: open_source(path), "opening a checkpoint", fails_as=CheckpointError)
        damages = partial(_damages, chosen, world)
        every = gather_on_all(world, damages, "checking a checkpoint", fails_as=CheckpointError)
        known[chosen] = list(dict.fromkeys(damage for of_rank in every for damage in of_rank))
        if not known[chosen]:
            return on_all(world, partial(open_source, chosen), "opening a checkpoint", fails_as=CheckpointError)


def _next_best(path: Path, step: int | str, known: Mapping[Path, Sequence[str]], locks: ExitStack) -> Path | None:
    """Returns the best checkpoint that is not known to be damaged, locked; None: none is ours."""
    locks.close()
    while True:
        candidates = _candidates(path, step)
        if candidates is None and not known:
            return None
        left = [saved.path for saved in candidates or () if saved.path not in known]
        if not left:
            raise CheckpointError(
                f"No checkpoint in {path} can be loaded: {'; '.join(chain.from_iterable(known.values()))}. Nothing has "
                "been changed; load an earlier step, or copy the damaged file again from where it is intact."
            )
        try:
            locks.enter_context(folder.lock_to_read(left[0]))
        except FileNotFoundError:
            continue  # another job has just saved a newer one, and removed this
        except OSError as error:
            logger.debug("%s cannot be locked: %s", left[0], error)
        if known and step == "latest":
            logger.warning("%s; going back to an earlier checkpoint", "; ".join(list(known.values())[-1]))
        return left[0]


def _candidates(path: Path, step: int | str) -> list[Saved] | None:
    """Returns the checkpoints in question, the best first; None: `path` is none of our folders."""
    if step != "latest" and (not isinstance(step, int) or isinstance(step, bool)):
        raise CheckpointError(f"step is {step!r}; expected a number, or 'latest'.")
    if path.is_dir() and (path / MANIFEST).exists():
        own = Saved(0, read_manifest(path).step, 0, path)
        if step not in ("latest", own.step):
            raise CheckpointError(f"{path} is of step {own.step}; got a request for step {step}.")
        return [own]
    try:
        every = folder.saved_in(path) if path.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Expected a folder of checkpoints.") from error
    if step == "latest":
        return every or None
    wanted = [saved for saved in every if saved.step == step]
    if not wanted:
        steps = ", ".join(str(saved.step) for saved in reversed(every)) or "none"
        raise CheckpointError(f"There is no checkpoint of step {step} in {path}; complete ones are: {steps}.")
    return wanted


def _damages(path: Path, world: World) -> list[str]:
    try:
        return read_manifest(path).damages(path, world.rank, world.num_ranks)
    except NotDamagedError:
        raise  # an earlier one would do instead, and those that follow would in time take its place
    except CheckpointError as error:
        return [str(error).rstrip(".")]


def open_source(path: Path) -> CheckpointSource:
    """Opens a checkpoint of ours, a Hugging Face folder, or a safetensors file; CheckpointError if there is none."""
    if path.is_file():
        return _from_files(path, [path])
    if (path / MANIFEST).exists():
        return _own(path)
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


def _own(path: Path) -> CheckpointSource:
    source = _from_index(path)
    others: dict[str, Entry] = {}
    for name in fnmatch.filter(read_manifest(path).files, OTHERS):
        others |= read_header(path / name)[0]
    state = _state(path / STATE, others)
    return CheckpointSource(path, source.weights, others, state["ties"], state)


class _Group(msgspec.Struct):
    params: list[str]


class _Optimizer(msgspec.Struct, rename={"kind": "class"}):
    kind: str
    param_groups: list[_Group]


class _State(msgspec.Struct):
    """What ``state.json`` holds; what is as a user gave it may be of any kind."""

    step: Whole
    ties: dict[str, str]
    generators: dict[str, dict[str, Any]]
    num_calls: Whole
    module_state: dict[str, Any]
    seed: int | None = None
    optimizer: _Optimizer | msgspec.UnsetType = msgspec.UNSET
    optimizer_state: dict[str, dict[str, Any]] = {}
    scaler: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    lr_scheduler: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def _state(path: Path, others: Mapping[str, Entry]) -> dict[str, Any]:
    """Returns what ``state.json`` says, once it is known that everything in it can be decoded."""
    content = _json(path)
    try:
        read_record(content, _State)
        decode(content, lambda name: torch.empty((), dtype=others[name].dtype))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Nothing has been changed; load another step.") from error
    return dict(content)


def _from_index(path: Path) -> CheckpointSource:
    index = _json(path / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path / INDEX} has no weight_map; expected the file of each weight, by name.")
    names = list(dict.fromkeys(weight_map.values()))
    if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise CheckpointError(
            f"{path / INDEX} tells of {outside[0]!r}, which is no file of {path}; expected names of files in that "
            "folder. Nothing outside it is read."
        )
    source = _from_files(path, [path / name for name in names])
    if absent := [name for name in weight_map if name not in source.weights]:
        raise CheckpointError(
            f"{path / INDEX} tells of {', '.join(absent[:3])} in {weight_map[absent[0]]}, which has no such tensor."
        )
    return source


def _from_files(path: Path, files: list[Path]) -> CheckpointSource:
    weights: dict[str, Entry] = {}
    ties: dict[str, str] = {}
    for file in files:
        entries, metadata = read_header(file)
        weights |= entries
        ties |= metadata  # safetensors' own save_model notes tied names there
    return CheckpointSource(path, weights, ties={name: kept for name, kept in ties.items() if kept in weights})


def _json(path: Path) -> Any:
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!s:.300}.") from error
