"""Lets an optimizer list the parameters of all ranks, and step over those alone whose numbers this rank has.

Between steps the groups are those of plain PyTorch, so that a script that goes over them sees what is elsewhere, and
whatever joins numbers of several ranks raises. While the step itself runs, inside of all hooks, they are cut down.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from autovaruna.runtime.weights.elsewhere import PLAIN, Elsewhere

_HOOKS = tuple(
    f"_optimizer_{what}_{when}_hooks" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)


def own_of(parameters: list[Tensor]) -> list[Tensor]:
    """Returns those parameters whose numbers this rank has."""
    return [each for each in parameters if not isinstance(each, Elsewhere)]


Whole = list[tuple[list[Tensor], list[Tensor]]]
"""The list of parameters of each group, and what was in it."""


def cut_down(optimizer: Optimizer) -> Whole:
    """Takes what is elsewhere out of the groups; the lists are the same ones, for others may share them."""
    whole = [(group["params"], group["params"][:]) for group in optimizer.param_groups]
    for parameters, every in whole:
        parameters[:] = own_of(every)
    return whole


def give_back(optimizer: Optimizer, whole: Whole) -> None:
    """Puts back into the groups what `cut_down` has taken out of them."""
    for group, (parameters, every) in zip(optimizer.param_groups, whole, strict=False):
        parameters[:] = every
        group["params"] = parameters


@contextmanager
def own_part(optimizer: Optimizer) -> Iterator[None]:
    """Takes what is elsewhere out of the groups for a while."""
    whole = cut_down(optimizer)
    try:
        yield
    finally:
        give_back(optimizer, whole)


@contextmanager
def own_state(optimizer: Optimizer) -> Iterator[None]:
    """Takes what is elsewhere out of groups and state for a while."""
    away: dict[Tensor, Any] = {each: optimizer.state[each] for each in optimizer.state if isinstance(each, Elsewhere)}
    for each in away:
        del optimizer.state[each]
    try:
        with own_part(optimizer):
            yield
    finally:
        optimizer.state.update(away)


def with_hooks(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer, which calls hooks from now on if its class, one that steps with another, has left them out.

    The class stays as it is, for the sake of other instances.
    """
    vars(optimizer).setdefault("defaults", {})
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        for name in _HOOKS:
            setattr(optimizer, name, OrderedDict())
        optimizer.step = MethodType(Optimizer.profile_hook_step(type(optimizer).step), optimizer)  # type: ignore[method-assign]
    return optimizer


class OwnSteps:
    """Cuts the groups of an optimizer down while its step runs, once it may.

    It is there from the start, for what a step is given to call may be the call of the model that splits it.

    Args:
        optimizer: The optimizer; its ``step`` and ``zero_grad`` are replaced by ones that do this.

    Attributes:
        is_on: Whether groups are cut down; until then, and where that is not right, nothing is done.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.is_on = False
        self._optimizer = optimizer
        self._whole: Whole | None = None
        self._depth = 0
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

    def _zero_grad(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            plain(*args, **kwargs)
            return
        with own_part(self._optimizer):
            plain(*args, **kwargs)
        if (args[0] if args else kwargs.get("set_to_none", True)) is False:
            return
        with PLAIN():  # one after the other through `Elsewhere` takes long
            for group in self._optimizer.param_groups:
                for each in group["params"]:
                    if isinstance(each, Elsewhere):
                        each.grad = None

    def _enter(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1 and self.is_on:
            self._whole = cut_down(self._optimizer)

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._give_back()

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
