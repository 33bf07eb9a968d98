"""Cuts an optimizer down to the parameters of this rank, in place, and puts its state together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.errors import InputError
from autovaruna.runtime.optimizers.own_part import own_part, own_state
from autovaruna.runtime.weights.elsewhere import Elsewhere
from autovaruna.runtime.weights.placement import Placement
from autovaruna.runtime.worlds.world import World


class CutOptimizer:
    """An optimizer of which each rank has the state of its own parameters; schedulers and hooks go on working.

    Args:
        optimizer: The user's optimizer, made from all parameters of the model.
        names: First name of each parameter, by identity.

    Raises:
        InputError: none of its parameters is the model's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self._groups = [
            [names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups
        ]
        self._is_cut = self._lists_own_alone = False
        if not any(name for names in self._groups for name in names):
            self.check()

    def adopt(self, names: list[list[str]]) -> None:
        """Takes the names of the whole optimizer, group by group: this one was made from this rank's part."""
        self._groups, self._is_cut, self._lists_own_alone = names, True, True

    def follow(self, names: Mapping[int, str], parameters: Mapping[str, nn.Parameter]) -> None:
        """Takes groups and parameters that have been added, or taken out.

        Args:
            names: First name of each parameter, by identity, those included that this rank has let go.
            parameters: All parameters by first name.

        Raises:
            InputError: the model has been split, and there are parameters that are not the model's.
        """
        first = len(self._groups) if self._lists_own_alone else 0
        for place, group in enumerate(self.optimizer.param_groups[first:], first):
            self._groups[place:] = [names.get(id(each), "") for each in group["params"]], *self._groups[place + 1 :]
            if self._is_cut:
                self.check()
                group["params"][:] = [parameters[name] for name in self._groups[place]]

    @property
    def has_changed(self) -> bool:
        """Whether groups have other numbers of parameters than are known."""
        groups, known = self.optimizer.param_groups, self._groups
        if len(groups) != len(known) or self._lists_own_alone:
            return len(groups) > len(known)
        return any(len(group["params"]) != len(names) for group, names in zip(groups, known, strict=True))

    @property
    def names(self) -> list[list[str]]:
        """First names of the parameters of the whole optimizer, group by group."""
        return self._groups

    def check(self) -> None:
        """Makes sure that the optimizer can be cut down.

        Raises:
            InputError: it has parameters that are not the model's.
        """
        names = [name for names in self._groups for name in names]
        if "" in names:
            raise InputError(
                f"{names.count('')} of the optimizer's {len(names)} parameters are not the model's, so that no rank "
                "would sum their gradients. Expected an optimizer of parameters of the wrapped model alone: make it "
                "from model.parameters() after the last change of the model (to(), a cast, new layers), and give other "
                "parameters an optimizer of their own."
            )

    def cut(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Takes the parameters as they are now into the groups, and drops the state of those that are elsewhere.

        Args:
            parameters: All of them by first name; one that was on ``meta`` is another object now.
        """
        for group, names in zip(self.optimizer.param_groups, self._groups, strict=True):
            now = [parameters[name] for name in names]
            for old, new in zip(group["params"], now, strict=True):
                state = self.optimizer.state.pop(old, None)
                if state is not None and not isinstance(new, Elsewhere):
                    self.optimizer.state[new] = state
            group["params"][:] = now
        self._is_cut = True

    def own_state(self) -> dict[str, Any]:
        """Returns the state of what this rank holds, whatever the optimizer's own ``state_dict()`` shows."""
        with own_state(self.optimizer):
            return type(self.optimizer).state_dict(self.optimizer)

    def load_own(self, state: dict[str, Any]) -> None:
        """Loads the state of what this rank holds."""
        with own_part(self.optimizer):
            type(self.optimizer).load_state_dict(self.optimizer, state)

    def state_dict(self, placement: Placement, world: World) -> dict[str, Any]:
        """Returns the state of the whole optimizer, in the form of plain PyTorch, on every rank. Collective."""
        if not self._is_cut:
            return self.own_state()
        own = self.own_state()
        mine = {name: own["state"].get(place, {}) for place, name in enumerate(self._own_names(world.rank, placement))}
        known = world.gather_objects({name: _without_numbers(state) for name, state in mine.items()}, "optimizer state")
        state: dict[int, dict[str, Any]] = {}
        for place, name in enumerate(name for names in self._groups for name in names):
            root = placement.ranks_of(name)[0]
            if known[root].get(name):
                state[place] = self._fetch(mine.get(name, {}), known[root][name], root, world)
        return {"state": state, "param_groups": self._whole_groups(own["param_groups"])}

    def load_state_dict(self, state: Mapping[str, Any], placement: Placement, rank: int) -> None:
        """Loads this rank's part of the state of a whole optimizer.

        Raises:
            InputError: the state is of an optimizer with other groups.
        """
        if not self._is_cut:
            self.load_own(dict(state))
            return
        sizes = [len(group["params"]) for group in state["param_groups"]]
        expected = [len(names) for names in self._groups]
        if sizes != expected:
            raise InputError(f"The optimizer state has groups of {sizes} parameters; expected groups of {expected}.")
        places = {name: index for index, name in enumerate(self._own_names(rank, placement))}
        own: dict[int, Any] = {}
        index = 0
        for group, names in zip(state["param_groups"], self._groups, strict=True):
            for place, name in zip(group["params"], names, strict=True):
                if name in places and place in state["state"]:
                    own[places[name]] = state["state"][place]
        groups = []
        for group, names in zip(state["param_groups"], self._groups, strict=True):
            count = sum(name in places for name in names)
            groups.append({**group, "params": list(range(index, index + count))})
            index += count
        self.load_own({"state": own, "param_groups": groups})

    def _own_names(self, rank: int, placement: Placement) -> list[str]:
        return [name for names in self._groups for name in names if not name or rank in placement.ranks_of(name)]

    def _whole_groups(self, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
        groups, start = [], 0
        for group, names in zip(own, self._groups, strict=True):
            groups.append({**group, "params": list(range(start, start + len(names)))})
            start += len(names)
        return groups

    def _fetch(self, own: Mapping[str, Any], known: Mapping[str, Any], root: int, world: World) -> dict[str, Any]:
        fetched: dict[str, Any] = {}
        for key, value in known.items():
            if isinstance(value, _Shape):
                tensor = (
                    own[key].detach().clone() if world.rank == root else torch.empty(value.shape, dtype=value.dtype)
                )
                world.broadcast(tensor, root, tuple(range(world.num_ranks)))
                fetched[key] = tensor
            else:
                fetched[key] = value
        return fetched


class _Shape:
    """Stands for a tensor of the state while only shapes are exchanged."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def _without_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _Shape(value) if isinstance(value, Tensor) else value for key, value in state.items()}
