"""Puts the state of a distributed model together under its original names, and takes it apart again.

What a script writes into a state that it was given reaches the model, as in plain PyTorch (`StateCopies`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from autovaruna._torch import IncompatibleKeys
from autovaruna.runtime.weights.placement import OwnedState, Placement
from autovaruna.runtime.world import World


class StateCopies:
    """Copies of parameters and buffers that a script was given, in which it may write.

    They are kept until `settle`, so that writes into a state that the script has dropped count, too; and followed from
    then on for as long as the script keeps them.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._known: list[tuple[Callable[[], Tensor | None], int, Tensor]] = []

    def lend(self, given: Tensor, own: Tensor) -> None:
        """Notes that a script was given a copy of a tensor."""
        self._kept.append(given)
        self._known.append((ref(given), given._version, own))

    def settle(self, *_: object) -> None:
        """Copies what has been written since into the model; a hook of the optimizer, too."""
        if not self._known:
            return
        known, self._known = self._known, []
        with torch.no_grad():
            for find, version, own in known:
                if (given := find()) is None:
                    continue
                if given._version != version:
                    own.copy_(given)
                self._known.append((find, given._version, own))
        given = None
        self._kept.clear()


def whole_state(state: OwnedState, placement: Placement, world: World, what: str, lent: StateCopies) -> dict[str, Any]:
    """Returns the whole model's ``state_dict`` on every rank. Collective; `what` names it in errors.

    Tied entries share one tensor, as in plain PyTorch. What a script writes into them reaches the model through `lent`.
    """
    world.barrier(what)  # says so if a rank is elsewhere, as messages do not
    entries: dict[str, Any] = state.model.state_dict()
    fetched: dict[str, Tensor] = {}
    for name, value in entries.items():
        first = state.first_name.get(name)
        if first is None or not isinstance(value, Tensor):
            continue
        ranks = placement.ranks_of(first)
        if first not in fetched:
            fetched[first] = (
                value
                if len(ranks) == world.num_ranks and first not in placement.holders
                else _fetch(value, ranks[0], world)
            )
            if fetched[first] is not value and not value.is_meta:
                lent.lend(fetched[first], value)
        entries[name] = fetched[first]
    return entries


def _fetch(value: Tensor, root: int, world: World) -> Tensor:
    tensor = value.detach().clone() if world.rank == root else _room_for(value)
    world.broadcast(tensor, root, tuple(range(world.num_ranks)))
    return tensor


def _room_for(value: Tensor) -> Tensor:
    device = "cpu" if value.is_meta else value.device
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def load_part(state: OwnedState, entries: Mapping[str, Any], is_strict: bool) -> Any:
    """Loads this rank's part of a whole ``state_dict``.

    Returns:
        Missing and unexpected keys, as plain PyTorch does.

    Raises:
        RuntimeError: as plain PyTorch: keys or shapes do not fit the whole model.
    """
    known = state.model.state_dict()
    missing = [name for name in known if name not in entries]
    unexpected = [name for name in entries if name not in known]
    errors = [
        f"size mismatch for {name}: got {tuple(entries[name].shape)}, expected {tuple(value.shape)}"
        for name, value in known.items()
        if isinstance(value, Tensor) and isinstance(entries.get(name), Tensor) and entries[name].shape != value.shape
    ]
    if is_strict:
        errors += [f"missing key {name}" for name in missing] + [f"unexpected key {name}" for name in unexpected]
    if errors:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(state.model).__name__}:\n\t" + "\n\t".join(errors)
        )
    mine = {name: value for name, value in entries.items() if name in known and not _is_elsewhere(known[name])}
    state.model.load_state_dict(mine, strict=False)
    return IncompatibleKeys(missing, unexpected)


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
