"""Cuts an optimizer down to the parameters of this rank, in place, and puts its state together again.

Between steps the groups are those of plain PyTorch, so that a script that goes over them sees what is elsewhere, and
whatever joins numbers of several ranks raises. While the step itself runs, inside of all hooks, they are cut down. An
optimizer whose steps join numbers of several parameters is refused.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import count
from threading import Lock, local
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autovaruna.config.settings import Sharing
from autovaruna.errors import InputError
from autovaruna.profiler.optimizer import Steps, steps_of
from autovaruna.runtime.remote_parameter import PLAIN, RemoteTensor
from autovaruna.runtime.weights import Placement, from_rank, share_of, split_models, spread_steps, steps_here
from autovaruna.runtime.world import World

_HOOKS = tuple(
    f"_optimizer_{what}_{when}_hooks" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)


def own_of(parameters: list[Tensor]) -> list[Tensor]:
    return [each for each in parameters if steps_here(each)]


Whole = list[tuple[list[Tensor], list[Tensor]]]
"""The list of parameters of each group, and what was in it."""


def cut_down(optimizer: Optimizer) -> Whole:
    """Takes what other ranks step over out of the groups; the lists are the same ones, for others may share them."""
    whole = [(group["params"], group["params"][:]) for group in optimizer.param_groups]
    for parameters, every in whole:
        parameters[:] = own_of(every)
    return whole


def give_back(optimizer: Optimizer, whole: Whole) -> None:
    for group, (parameters, every) in zip(optimizer.param_groups, whole, strict=False):
        parameters[:] = every
        group["params"] = parameters


@contextmanager
def own_part(optimizer: Optimizer) -> Iterator[None]:
    """Takes what other ranks step over out of the groups for a while."""
    whole = cut_down(optimizer)
    try:
        yield
    finally:
        give_back(optimizer, whole)


def with_hooks(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer, which calls hooks from now on if its class, which steps with another, has left them out."""
    vars(optimizer).setdefault("defaults", {})
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        for name in _HOOKS:
            setattr(optimizer, name, OrderedDict())
        optimizer.step = MethodType(Optimizer.profile_hook_step(type(optimizer).step), optimizer)  # type: ignore[method-assign]
    return optimizer


class _OnThisThread(local):
    """What this thread, which may be one of several ranks, is doing."""

    outermost: OwnSteps | None = None
    """The step that is under way; steps of optimizers that it steps with are part of it."""


_on_this_thread = _OnThisThread()


class OwnSteps:
    """Cuts the groups of an optimizer down while its ``step`` or ``zero_grad`` runs, once it `is_on`.

    It is there from the start, for what a step is given to call may be the call of the model that splits it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.is_on = False
        """Whether groups are cut down; until then, and where that is not right, nothing is done."""
        self._optimizer, self._depth = optimizer, 0
        self._whole: Whole | None = None
        self._before = optimizer.register_step_pre_hook(self._enter)
        self._after = optimizer.register_step_post_hook(self._leave)
        optimizer.step = _around(optimizer, optimizer.step, self._step)  # type: ignore[method-assign]
        optimizer.zero_grad = _around(optimizer, optimizer.zero_grad, self._zero_grad)  # type: ignore[method-assign]

    def _step(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a step; hooks, and what the script gives it to call, see the parameters of all ranks."""
        if not (self.is_on or args or kwargs):  # nothing that it calls could turn this on
            return plain()
        before: Any = self._optimizer._optimizer_step_pre_hooks
        after: Any = self._optimizer._optimizer_step_post_hooks
        before.move_to_end(self._before.id)
        after.move_to_end(self._after.id, last=False)
        args = tuple(map(self._outside, args))
        try:
            return plain(*args, **{name: self._outside(value) for name, value in kwargs.items()})
        finally:
            self._depth = 0
            self._give_back()
            if _on_this_thread.outermost is self:
                _on_this_thread.outermost = None

    def _zero_grad(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            plain(*args, **kwargs)
            return
        with own_part(self._optimizer):
            plain(*args, **kwargs)
        if (args[0] if args else kwargs.get("set_to_none", True)) is False:
            return
        with PLAIN():  # one after the other through `RemoteTensor` takes long
            for group in self._optimizer.param_groups:
                for each in group["params"]:
                    if not steps_here(each):
                        each.grad = None

    def _enter(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1 and self.is_on:
            self._whole = cut_down(self._optimizer)
            _on_this_thread.outermost = _on_this_thread.outermost or self

    @property
    def listed(self) -> list[Tensor]:
        """The parameters of all ranks in the groups, while they are cut down."""
        return [each for _, every in self._whole or () for each in every]

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._whole is not None:
            listed = self.listed
            self._give_back()
            if _on_this_thread.outermost is self:
                _on_this_thread.outermost = None
                spread_steps(listed)

    def _give_back(self) -> None:
        if self._whole is not None:
            whole, self._whole = self._whole, None
            give_back(self._optimizer, whole)

    def _outside(self, value: Any) -> Any:
        """Returns a closure that is called with the whole groups; anything else as it is."""
        if not callable(value) or isinstance(value, Tensor):
            return value

        @wraps(value)
        def closure(*args: Any, **kwargs: Any) -> Any:
            depth, self._depth = self._depth, 0
            self._give_back()
            try:
                return value(*args, **kwargs)
            finally:
                for _ in range(depth):
                    self._enter()

        return closure


def _around(optimizer: Optimizer, plain: Any, act: Callable[..., Any]) -> Any:
    """Returns a method that has `act` call another one; learning-rate schedules take methods apart."""
    function = plain.__func__ if isinstance(plain, MethodType) else None

    @wraps(function or plain)
    def method(own: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return act(plain if function is None else partial(function, own), *args, **kwargs)

    return MethodType(method, optimizer)


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
        """Takes groups and parameters that have been added, or taken out.

        `names` are by identity, those included that this rank has let go. Raises an `InputError` if the model has been
        split, and there are parameters that are not the model's.
        """
        first = len(self.names) if self._lists_own_alone else 0
        for place, group in enumerate(self.optimizer.param_groups[first:], first):
            self.names[place:] = [names.get(id(each), "") for each in group["params"]], *self.names[place + 1 :]
            if self._is_cut:
                self.check()
                group["params"][:] = [parameters[name] for name in self.names[place]]

    @property
    def has_changed(self) -> bool:
        """Whether groups have other numbers of parameters than are known."""
        groups, known = self.optimizer.param_groups, self.names
        if len(groups) != len(known) or self._lists_own_alone:
            return len(groups) > len(known)
        return any(len(group["params"]) != len(names) for group, names in zip(groups, known, strict=True))

    def check(self) -> None:
        """Raises an `InputError` if the optimizer has parameters that are not the model's."""
        names = [name for names in self.names for name in names]
        if "" in names:
            kind = type(self.optimizer).__name__
            raise InputError(
                f"{names.count('')} of the optimizer's {len(names)} parameters are not the model's, so that no rank "
                "would sum their gradients. Expected an optimizer of parameters of the wrapped model alone: make it "
                "from model.parameters() after the last change of the model (to(), a cast, new layers), and give other "
                f"parameters an optimizer of their own. Two models have two: {kind}(first.parameters(), ...) goes to "
                f"AutoVaruna(first, ...), {kind}(second.parameters(), ...) to AutoVaruna(second, ...), and both step."
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
            with own_part(self.optimizer):
                return type(self.optimizer).state_dict(self.optimizer)
        finally:
            state.update(away)

    def load_own(self, state: dict[str, Any]) -> None:
        with own_part(self.optimizer):
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


logger = logging.getLogger(__name__)
_known: WeakSet[Optimizer] = WeakSet()
_is_watching = False
_one_at_a_time = Lock()


def step_over_own_part(
    optimizer: Optimizer, own: OwnSteps, num_ranks: int, device: torch.device, *, is_shared: bool
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
    own.is_on = steps.kind == "separate"
    if not own.is_on:
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


def watch_later_optimizers() -> None:
    """Does the same for other optimizers that have parameters that are elsewhere, at the first step of each."""
    global _is_watching
    with _one_at_a_time:  # ranks may be threads
        if not _is_watching:
            register_optimizer_step_pre_hook(_note)
            _is_watching = True


def _note(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _known:
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    away = [each.home for each in parameters if isinstance(each, RemoteTensor)]
    shared = {id(each): share.home for each in parameters if (share := share_of(each)) is not None}
    outermost = _on_this_thread.outermost
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
        step_over_own_part(optimizer, OwnSteps(optimizer), num_ranks, home.device, is_shared=bool(shared))
        _show_whole_state(optimizer, parameters)


def _show_whole_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Lets the optimizer's own methods give and take the state of all parameters, if they are of one model."""
    for model in split_models():
        names = model.names()
        if all(id(each) in names for each in parameters):
            cut = CutOptimizer(optimizer, names)
            cut.cut(model.parameters())
            rank = model.world.rank
            optimizer.state_dict = partial(cut.state_dict, model.placement, model.world)  # type: ignore[method-assign]
            optimizer.load_state_dict = partial(  # type: ignore[method-assign]
                cut.load_state_dict, placement=model.placement, rank=rank
            )


_DOES = {
    "joint": "joins numbers of several parameters in its steps",
    "random": "draws random numbers in its steps",
    "unknown": "cannot be tried out",
}


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
        f"numbers alone; or pass num_stages=1 and num_replicas={num_ranks}, so that every rank holds them all; or, if "
        "it clips by a norm of all gradients, turn that off and call model.clip_grad_norm_() before its step."
    )
