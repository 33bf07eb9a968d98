"""Cuts an optimizer down to the parameters of this rank, in place, and puts its state together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.errors import InputError
from autovaruna.runtime.placement import Placement
from autovaruna.runtime.world import World


def refuse_joint_steps(optimizer: torch.optim.Optimizer, placement: Placement) -> None:
    """Refuses an optimizer that needs all parameters at once, unless every rank holds them all.

    Raises:
        InputError: it is LBFGS, and the plan splits the model.
    """
    split = [name for name, ranks in placement.holders.items() if len(ranks) < placement.num_ranks]
    if isinstance(optimizer, torch.optim.LBFGS) and split:
        raise InputError(
            f"LBFGS makes one step of all parameters together: got a plan that puts {split[0]} on ranks "
            f"{list(placement.ranks_of(split[0]))} alone. Expected every rank to hold them all; pass num_stages=1 and "
            f"num_replicas={placement.num_ranks}, or take another optimizer."
        )


class CutOptimizer:
    """An optimizer whose groups keep this rank's parameters alone; schedulers and hooks go on working.

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
        self._is_cut = False
        if not any(name for names in self._groups for name in names):
            self.check()

    def adopt(self, names: list[list[str]]) -> None:
        """Takes the names of the whole optimizer, group by group: this one was made from this rank's part."""
        self._groups, self._is_cut = names, True

    @property
    def has_grown(self) -> bool:
        """Whether groups have been added that are not known yet."""
        return len(self.optimizer.param_groups) > len(self._groups)

    def grow(self, names: Mapping[int, str], held: Mapping[str, nn.Parameter]) -> None:
        """Takes the groups that have been added; if the optimizer has been cut, they are cut, too.

        Args:
            names: First name of each parameter, by identity, those included that this rank has let go.
            held: What this rank holds, by first name.

        Raises:
            InputError: they have parameters that are not the model's.
        """
        for group in self.optimizer.param_groups[len(self._groups) :]:
            self._groups.append([names.get(id(parameter), "") for parameter in group["params"]])
            if self._is_cut:
                self.check()
                group["params"][:] = [held[name] for name in self._groups[-1] if name in held]

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

    def cut(self, held: Mapping[str, nn.Parameter]) -> None:
        """Takes the parameters that this rank does not hold out of every group; empty groups stay.

        Args:
            held: What this rank holds, by first name; a parameter that was on ``meta`` is another object now.
        """
        for group, names in zip(self.optimizer.param_groups, self._groups, strict=True):
            own = [held.get(name) for name in names]
            for old, new in zip(group["params"], own, strict=True):
                state = self.optimizer.state.pop(old, None)
                if new is not None and state is not None:
                    self.optimizer.state[new] = state
            group["params"][:] = [parameter for parameter in own if parameter is not None]
        self._is_cut = True

    def own_state(self) -> dict[str, Any]:
        """Returns the state of what this rank holds, whatever the optimizer's own ``state_dict()`` shows."""
        return type(self.optimizer).state_dict(self.optimizer)

    def load_own(self, state: dict[str, Any]) -> None:
        """Loads the state of what this rank holds."""
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
