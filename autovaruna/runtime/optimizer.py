"""Cuts an optimizer down to the parameters of this rank, in place, and puts its state together again.

Between steps the groups are those of plain PyTorch, so that a script that goes over them sees what is elsewhere, and
whatever joins numbers of several ranks raises. While the step itself runs, inside of all hooks, they are cut down. An
optimizer whose steps join numbers of several parameters is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autovaruna.config.settings import Sharing
from autovaruna.errors import InputError
from autovaruna.interception.installed import ProcessPiece, Undo
from autovaruna.interception.optimizer_proxy import (
    OptimizerProxy,
    cut_groups,
    outermost_step,
    parameters_of,
    watch_steps,
)
from autovaruna.profiler.optimizer_trial import Steps, steps_of
from autovaruna.ranks.world import World
from autovaruna.runtime.remote_parameter import RemoteTensor, without_overrides
from autovaruna.runtime.weights import Placement, from_rank, shared_parameter, split_models, spread_steps, steps_here

logger = logging.getLogger(__name__)
_DOES = {
    "joint": "joins numbers of several parameters in its steps",
    "random": "draws random numbers in its steps",
    "unknown": "cannot be tried out",
}


class RankOwnership:
    """What this rank holds of split models, as the steps of optimizers need it."""

    def own(self, parameters: list[Tensor]) -> list[Tensor]:
        return [each for each in parameters if steps_here(each)]

    def clear(self, parameters: Sequence[Tensor]) -> None:
        with without_overrides():  # one after the other through `RemoteTensor` takes long
            for each in parameters:
                if not steps_here(each):
                    each.grad = None

    def spread(self, parameters: Sequence[Tensor]) -> None:
        spread_steps(parameters)


OWNERSHIP = RankOwnership()


class CutOptimizer:
    """An optimizer, made from all parameters of the model, of which each rank has the state of its own.

    `names` has the first name of each parameter by identity. Raises an `InputError` if none is the model's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self.names = [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
        """First names of the parameters of the whole optimizer, group by group."""
        self._is_cut = self._lists_own_alone = False
        if not any(name for names in self.names for name in names):
            self.check()

    def adopt(self, names: list[list[str]]) -> None:
        """Takes the names of the whole optimizer, group by group: this one was made from this rank's part."""
        self.names, self._is_cut, self._lists_own_alone = names, True, True

    def follow(self, names: Mapping[int, str], parameters: Mapping[str, nn.Parameter]) -> None:
        """Takes groups and parameters that have been added, taken out or put in another order.

        `names` are by identity, those included that this rank has let go. Raises an `InputError` if the model has been
        split, and there are parameters that are not the model's.
        """
        first = len(self.names) if self._lists_own_alone else 0
        groups = self.optimizer.param_groups[first:]
        self.names[first:] = [[names.get(id(each), "") for each in group["params"]] for group in groups]
        if self._is_cut:
            self.check()
            for group, own in zip(groups, self.names[first:], strict=True):
                group["params"][:] = [parameters[name] for name in own]

    def check(self) -> None:
        """Raises an `InputError` if the optimizer has parameters that are not the model's."""
        names = [name for names in self.names for name in names]
        if "" in names:
            kind = type(self.optimizer).__name__
            raise InputError(
                f"{names.count('')} of the optimizer's {len(names)} parameters are not the model's, so that no rank "
                "would sum their gradients. Expected an optimizer of parameters of the wrapped model alone: make it "
                "from model.parameters() after the last change of the model (to(), a cast, new layers), and have what "
                "else is trained (a head, a loss with weights) in the wrapped model's forward. Two models have two: "
                f"{kind}(first.parameters(), ...) goes to AutoVaruna(first, ...), {kind}(second.parameters(), ...) to "
                "AutoVaruna(second, ...), and both step."
            )

    def cut(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Takes the parameters as they are now, by first name, and drops the state of those that are elsewhere."""
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            now = [parameters[name] for name in names]
            for old, new in zip(group["params"], now, strict=True):
                state = self.optimizer.state.pop(old, None)
                if state is not None and steps_here(new):
                    self.optimizer.state[new] = state
            group["params"][:] = now
        self._is_cut = True

    def own_state(self) -> dict[str, Any]:
        """Returns the state of this rank's part; what other ranks step over is out of groups and state meanwhile."""
        state = self.optimizer.state
        away = {each: state[each] for each in state if isinstance(each, Tensor) and not steps_here(each)}
        for each in away:
            del state[each]
        try:
            with cut_groups(self.optimizer, OWNERSHIP.own):
                return type(self.optimizer).state_dict(self.optimizer)
        finally:
            state.update(away)

    def load_own(self, state: dict[str, Any]) -> None:
        with cut_groups(self.optimizer, OWNERSHIP.own):
            type(self.optimizer).load_state_dict(self.optimizer, state)

    def state_dict(self, placement: Placement, world: World) -> dict[str, Any]:
        """Returns the state of the whole optimizer, in the form of plain PyTorch, on every rank. Collective."""
        if not self._is_cut:
            return self.own_state()
        own = self.own_state()
        mine = {name: own["state"].get(place, {}) for place, name in enumerate(self._own_names(world.rank, placement))}
        shapes = {name: {key: _on_meta(value) for key, value in state.items()} for name, state in mine.items()}
        known = world.gather_objects(shapes, "optimizer state")
        state: dict[int, dict[str, Any]] = {}
        for place, name in enumerate(name for names in self.names for name in names):
            root = placement.steppers_of(name)[0]
            if known[root].get(name):
                own_state = mine[name] if world.rank == root else known[root][name]
                state[place] = {key: from_rank(value, root, world) for key, value in own_state.items()}
        places, own_groups = count(), zip(own["param_groups"], self.names, strict=True)
        groups = [{**group, "params": [next(places) for _ in names]} for group, names in own_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any], placement: Placement, rank: int) -> None:
        """Loads this rank's part of the state of a whole optimizer; raises an `InputError` if its groups are others."""
        if not self._is_cut:
            self.load_own(dict(state))
            return
        sizes = [len(group["params"]) for group in state["param_groups"]]
        expected = [len(names) for names in self.names]
        if sizes != expected:
            raise InputError(f"The optimizer state has groups of {sizes} parameters; expected groups of {expected}.")
        own: dict[int, Any] = {}
        groups, mine = [], iter(range(sum(sizes)))
        here = set(self._own_names(rank, placement))
        for group, names in zip(state["param_groups"], self.names, strict=True):
            held = {next(mine): place for place, name in zip(group["params"], names, strict=True) if name in here}
            own |= {index: state["state"][place] for index, place in held.items() if place in state["state"]}
            groups.append({**group, "params": list(held)})
        self.load_own({"state": own, "param_groups": groups})

    def _own_names(self, rank: int, placement: Placement) -> list[str]:
        return [name for names in self.names for name in names if not name or rank in placement.steppers_of(name)]


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


_known: WeakSet[Optimizer] = WeakSet()


def step_over_own_part(
    proxy: OptimizerProxy, optimizer: Optimizer, num_ranks: int, device: torch.device, *, is_shared: bool
) -> None:
    """Cuts the steps of an optimizer, some of whose parameters are elsewhere or shared out, down to this rank's part.

    Raises:
        InputError: its steps join numbers of parameters, draw, or cannot be tried while parameters are shared out.
    """
    steps = steps_of(optimizer, device)
    if steps.kind != "separate" and is_shared:
        raise InputError(_refusal_to_share(type(optimizer).__name__, steps))
    if steps.kind in ("joint", "random"):
        raise InputError(_refusal(type(optimizer).__name__, steps, num_ranks))
    proxy.is_on = steps.kind == "separate"
    if not proxy.is_on:
        logger.warning(
            "cannot try out whether %s updates each parameter by itself (%s): each rank steps over all parameters, "
            "and what joins numbers of several ranks will raise",
            type(optimizer).__name__,
            steps.what,
        )
    _known.add(optimizer)


def sharing_of(optimizer: Optimizer | None, setting: Sharing, device: torch.device) -> Sharing:
    """Returns whether replicas share an optimizer's state; ``auto``: they may. Raises if they are to and cannot."""
    if setting is False or optimizer is None:
        return setting is True
    steps = steps_of(optimizer, device)
    if setting is True and steps.kind != "separate":
        raise InputError(_refusal_to_share(type(optimizer).__name__, steps))
    return setting if steps.kind == "separate" else False


_later: WeakSet[OptimizerProxy] = WeakSet()


def _watch_later_optimizers() -> Undo:
    """Does the same for other optimizers that have parameters that are elsewhere, at the first step of each."""
    stop = watch_steps(_cut_at_first_step)

    def undo() -> None:
        stop()
        for proxy in list(_later):
            proxy.remove()

    return undo


LATER_OPTIMIZERS = ProcessPiece(_watch_later_optimizers)


def _cut_at_first_step(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _known:
        return
    parameters = parameters_of(optimizer)
    away = [each.home for each in parameters if isinstance(each, RemoteTensor)]
    shared = {id(each): known.home for each in parameters if (known := shared_parameter(each)) is not None}
    outermost = outermost_step()
    if outermost is not None and shared.keys() - set(map(id, outermost.listed)):
        raise InputError(
            f"An optimizer steps with a {type(optimizer).__name__} of other parameters than its own: got shared "
            "optimizer state, which the ranks exchange after the step of the first. Expected all parameters in its "
            "param_groups; or pass shard_optimizer=False."
        )
    if outermost is not None and all(map(steps_here, parameters)):
        return  # its lists are those of the one that steps with it
    if home := next(iter((*away, *shared.values())), None):
        num_ranks = 1 + max(home.rank, *home.ranks)
        proxy = OptimizerProxy(optimizer, OWNERSHIP)
        _later.add(proxy)
        step_over_own_part(proxy, optimizer, num_ranks, home.device, is_shared=bool(shared))
        _show_whole_state(proxy, optimizer, parameters)


def _show_whole_state(proxy: OptimizerProxy, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Lets the optimizer's own methods give and take the state of all parameters, if they are of one model."""
    for model in split_models():
        names = model.names()
        if all(id(each) in names for each in parameters):
            cut = CutOptimizer(optimizer, names)
            cut.cut(model.parameters())
            rank = model.world.rank
            proxy.show(
                state_dict=partial(cut.state_dict, model.placement, model.world),
                load_state_dict=partial(cut.load_state_dict, placement=model.placement, rank=rank),
            )


def _refusal_to_share(name: str, steps: Steps) -> str:
    """Returns what to say to an optimizer whose state cannot be shared out."""
    return (
        f"shard_optimizer is true, and {name} {_DOES[steps.kind]} ({steps.what}). Expected an optimizer that updates "
        "each parameter by its own numbers alone, whose state replicas can share; or pass shard_optimizer=False."
    )


def _refusal(name: str, steps: Steps, num_ranks: int) -> str:
    """Returns what to say to an optimizer that would step otherwise than in plain PyTorch."""
    return (
        f"{name} {_DOES[steps.kind]}, and the plan splits the model, so that no rank holds all parameters: got an "
        f"optimizer that was tried out, where {steps.what}. Expected one that updates each parameter by its own "
        f"numbers alone; or pass num_stages=1 and num_replicas={num_ranks}, so that every rank holds them all, and, "
        "where it goes by a loss that is made outside of the model, inputs='replicated', for all are to go by one "
        "loss; or, if it clips by a norm of all gradients, turn that off and call model.clip_grad_norm_() before its "
        "step."
    )
