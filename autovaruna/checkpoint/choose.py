"""Finds the checkpoint to load: complete, and intact to the last bit."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import SupportsIndex

from autovaruna.checkpoint.folder import Saved, saved_in
from autovaruna.checkpoint.manifest import MANIFEST, read_manifest
from autovaruna.checkpoint.source import Source, open_source
from autovaruna.checkpoint.together import on_first, together
from autovaruna.errors import CheckpointError
from autovaruna.runtime.worlds.differences import differences
from autovaruna.runtime.worlds.world import World

logger = logging.getLogger(__name__)


def choose(world: World, root: str | os.PathLike[str], step: int | str) -> Source:
    """Returns a checkpoint that is intact; the ranks share the checking. Collective.

    Args:
        world: The ranks.
        root: A folder of checkpoints, one of them, a Hugging Face folder, or a safetensors file.
        step: The step, or ``"latest"``: the newest that is intact.

    Raises:
        CheckpointError: there is none, and what is damaged, and how; or the ranks ask for different ones.
    """
    path = Path(root)
    step = step if isinstance(step, str | bool) or not isinstance(step, SupportsIndex) else step.__index__()
    asked = world.gather_objects({"step": repr(step)}, "looking for checkpoints")
    if found := differences(asked):
        raise CheckpointError(f"The ranks load different checkpoints: {found}. Expected the same step on every rank.")
    candidates = on_first(world, lambda: _candidates(path, step), "looking for checkpoints")
    if candidates is None:
        return together(world, lambda: open_source(path), "opening a checkpoint")
    damages: list[str] = []
    for saved in candidates:
        own = _damages(saved.path, world)
        every = world.gather_objects(own, "checking a checkpoint")
        fresh = list(dict.fromkeys(damage for of_rank in every for damage in of_rank))
        if not fresh:
            return together(world, lambda saved=saved: open_source(saved.path), "opening a checkpoint")  # type: ignore[misc]
        damages += fresh
        if step == "latest" and world.rank == 0 and saved is not candidates[-1]:
            logger.warning("%s; going back to an earlier checkpoint", "; ".join(fresh))
    raise CheckpointError(
        f"No checkpoint in {path} can be loaded: {'; '.join(damages)}. Nothing has been changed; load an earlier step, "
        "or copy the damaged file again from where it is intact."
    )


def _candidates(path: Path, step: int | str) -> list[Saved] | None:
    """Returns the checkpoints in question, the best first; None: `path` is none of our folders."""
    if step != "latest" and (not isinstance(step, int) or isinstance(step, bool)):
        raise CheckpointError(f"step is {step!r}; expected a number, or 'latest'.")
    if path.is_dir() and (path / MANIFEST).exists():
        own = Saved(0, read_manifest(path).step, 0, path)
        if step not in ("latest", own.step):
            raise CheckpointError(f"{path} is of step {own.step}; got a request for step {step}.")
        return [own]
    every = saved_in(path) if path.is_dir() else []
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
    except CheckpointError as error:
        return [str(error).rstrip(".")]
