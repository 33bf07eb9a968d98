"""Finds the checkpoint to load: complete, and intact to the last bit."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path

from autovaruna.checkpoint.claim import read_claim
from autovaruna.checkpoint.folder import Saved, saved_in
from autovaruna.checkpoint.manifest import MANIFEST, OtherFormatError, UnreadableError, read_manifest
from autovaruna.checkpoint.numbers import is_whole
from autovaruna.checkpoint.place import ask_differently, place_of
from autovaruna.checkpoint.source import Source, open_source
from autovaruna.checkpoint.together import on_first, together
from autovaruna.errors import CheckpointError
from autovaruna.runtime.worlds.on_all import gather_on_all
from autovaruna.runtime.worlds.world import World

logger = logging.getLogger(__name__)


def choose(world: World, root: str | os.PathLike[str], step: int | str, claims: ExitStack) -> Source:
    """Returns a checkpoint that is intact; the ranks share the checking. Collective.

    Args:
        world: The ranks.
        root: A folder of checkpoints, one of them, a Hugging Face folder, or a safetensors file.
        step: The step, or ``"latest"``: the newest that is intact.
        claims: Keeps another job that saves from removing the checkpoint, until it is closed.

    Raises:
        CheckpointError: there is none, and what is damaged, and how; or the ranks ask for different ones.
    """
    path = Path(place_of(root))
    step = int(step) if is_whole(step) else step
    if found := ask_differently(world, str(path), {"step": repr(step)}, "looking for checkpoints"):
        raise CheckpointError(f"The ranks load different checkpoints: {found}. Expected the same on every rank.")
    known: dict[Path, list[str]] = {}
    while True:
        chosen = on_first(world, lambda: _next_best(path, step, known, claims), "looking for checkpoints")
        if chosen is None:
            return together(world, lambda: open_source(path), "opening a checkpoint")
        every = gather_on_all(world, partial(_damages, chosen, world), "checking a checkpoint", waits=True)
        known[chosen] = list(dict.fromkeys(damage for of_rank in every for damage in of_rank))
        if not known[chosen]:
            return together(world, partial(open_source, chosen), "opening a checkpoint")


def _next_best(path: Path, step: int | str, known: Mapping[Path, Sequence[str]], claims: ExitStack) -> Path | None:
    """Returns the best checkpoint that is not known to be damaged, with a claim on it; None: none is ours.

    Raises:
        CheckpointError: there is none.
    """
    claims.close()
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
            claims.enter_context(read_claim(left[0]))
        except FileNotFoundError:
            continue  # another job has just saved a newer one, and removed this
        except OSError as error:
            logger.debug("%s cannot be claimed: %s", left[0], error)
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
        every = saved_in(path) if path.is_dir() else []
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
    except (OtherFormatError, UnreadableError):
        raise  # an earlier one would do instead, and those that follow would in time take its place
    except CheckpointError as error:
        return [str(error).rstrip(".")]
