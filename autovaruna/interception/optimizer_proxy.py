"""Stands between a script and its optimizer: what is due before a step, around it and after it, in one order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from threading import local
from types import MethodType
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autovaruna._torch import OPTIMIZER_HOOKS, step_hooks
from autovaruna.interception.installed import Undo, put

Own = Callable[[list[Tensor]], list[Tensor]]
"""Returns those of some parameters that this rank steps over."""
Whole = list[tuple[list[Tensor], list[Tensor]]]
"""The list of parameters of each group, and what was in it."""


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """Returns the parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def cut_down(optimizer: Optimizer, own: Own) -> Whole:
    """Takes what other ranks step over out of the groups; the lists are the same ones, for others may share them."""
    whole = [(group["params"], group["params"][:]) for group in optimizer.param_groups]
    for parameters, every in whole:
        parameters[:] = own(every)
    return whole


def give_back(optimizer: Optimizer, whole: Whole) -> None:
    """Puts into the groups what `cut_down` has taken out."""
    for group, (parameters, every) in zip(optimizer.param_groups, whole, strict=False):
        parameters[:] = every
        group["params"] = parameters


@contextmanager
def cut_groups(optimizer: Optimizer, own: Own) -> Iterator[None]:
    """Takes what other ranks step over out of the groups for a while."""
    whole = cut_down(optimizer, own)
    try:
        yield
    finally:
        give_back(optimizer, whole)


class Ownership(Protocol):
    """This rank's part of a split model, as steps need it."""

    def own(self, parameters: list[Tensor]) -> list[Tensor]:
        """Returns those of some parameters that this rank steps over."""

    def clear(self, parameters: Sequence[Tensor]) -> None:
        """Drops the gradients of those that it does not step over."""

    def spread(self, parameters: Sequence[Tensor]) -> None:
        """Gives the new weights of those that ranks have stepped over to the others that hold them. Collective."""


class _OnThisThread(local):
    """What this thread, which may be one of several ranks, is doing."""

    outermost: OptimizerProxy | None = None


_on_this_thread = _OnThisThread()


def outermost_step() -> OptimizerProxy | None:
    """Returns the proxy whose step is under way on this thread; steps of optimizers that it steps with belong to it."""
    return _on_this_thread.outermost


def watch_steps(act: Callable[..., Any]) -> Undo:
    """Has `act` called with every optimizer before its step."""
    return register_optimizer_step_pre_hook(act).remove


class OptimizerProxy:
    """Stands between a script and its optimizer, on the object itself, until it is removed.

        hooks of the script before a step
        before       one after the other
        cut down     groups list this rank's part alone, once the proxy `is_on`
            the optimizer's own step; a closure that it calls finds the groups whole
        give back    groups are whole, and ranks give each other their new weights
        after        one after the other
        hooks of the script after a step

    It is there before the model is split, for what a step is given to call may be the call of the model that splits it.
    """

    def __init__(self, optimizer: Optimizer, ownership: Ownership) -> None:
        self.is_on = False
        """Whether groups are cut down; until then, and where that is not right, nothing is."""
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        self.on_clear: list[Callable[[], None]] = []
        self.on_loss: Callable[[Any], None] | None = None
        self._optimizer, self._ownership, self._depth = optimizer, ownership, 0
        self._whole: Whole | None = None
        self._undo = _with_hooks(optimizer)
        self._before_step = optimizer.register_step_pre_hook(self._enter)
        self._after_step = optimizer.register_step_post_hook(self._leave)
        self._undo += [self._before_step.remove, self._after_step.remove]
        self._undo.append(put(optimizer, "step", _around(optimizer, optimizer.step, self._step)))
        self._undo.append(put(optimizer, "zero_grad", _around(optimizer, optimizer.zero_grad, self._zero_grad)))

    def show(self, **methods: Callable[..., Any]) -> None:
        """Puts other methods in the place of the optimizer's own, by name."""
        self._undo += [put(self._optimizer, name, method) for name, method in methods.items()]

    def remove(self) -> None:
        """Leaves the optimizer as it was."""
        self.is_on, self.before, self.after, self.on_clear, self.on_loss = False, [], [], [], None
        while self._undo:
            self._undo.pop()()

    def _step(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a step; hooks, and what the script gives it to call, see the parameters of all ranks."""
        first, last = step_hooks(self._optimizer)
        if self._before_step.id in first:
            first.move_to_end(self._before_step.id)
            last.move_to_end(self._after_step.id, last=False)
        args = tuple(map(self._with_whole_groups, args))
        try:
            return plain(*args, **{name: self._with_whole_groups(value) for name, value in kwargs.items()})
        finally:
            self._depth = 0
            self._give_back()
            if _on_this_thread.outermost is self:
                _on_this_thread.outermost = None

    def _zero_grad(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for act in self.on_clear:
            act()
        if not self.is_on:
            plain(*args, **kwargs)
            return
        with cut_groups(self._optimizer, self._ownership.own):
            plain(*args, **kwargs)
        if (args[0] if args else kwargs.get("set_to_none", True)) is not False:
            self._ownership.clear(parameters_of(self._optimizer))

    def _enter(self, *_: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for act in self.before:
            act()
        self._cut_down()

    def _cut_down(self) -> None:
        if self.is_on:
            self._whole = cut_down(self._optimizer, self._ownership.own)
            _on_this_thread.outermost = _on_this_thread.outermost or self

    @property
    def listed(self) -> list[Tensor]:
        """The parameters of all ranks in the groups, while they are cut down."""
        return [each for _, every in self._whole or () for each in every]

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        if self._whole is not None:
            listed = self.listed
            self._give_back()
            if _on_this_thread.outermost is self:
                _on_this_thread.outermost = None
                self._ownership.spread(listed)
        for act in self.after:
            act()

    def _give_back(self) -> None:
        if self._whole is not None:
            whole, self._whole = self._whole, None
            give_back(self._optimizer, whole)

    def _with_whole_groups(self, value: Any) -> Any:
        """Returns a closure that is called with the whole groups; anything else as it is."""
        if not callable(value) or isinstance(value, Tensor | Optimizer):
            return value

        @wraps(value)
        def closure(*args: Any, **kwargs: Any) -> Any:
            depth, self._depth = self._depth, 0
            self._give_back()
            try:
                loss = value(*args, **kwargs)
                if self.on_loss is not None:
                    self.on_loss(loss)
                return loss
            finally:
                self._depth = depth
                if depth:
                    self._cut_down()

        return closure


def _with_hooks(optimizer: Optimizer) -> list[Undo]:
    """Has an optimizer call hooks, if its class, which steps with another, has left them out."""
    vars(optimizer).setdefault("defaults", {})
    if hasattr(optimizer, OPTIMIZER_HOOKS[0]):
        return []
    undo = [put(optimizer, name, OrderedDict()) for name in OPTIMIZER_HOOKS]
    hooked = MethodType(Optimizer.profile_hook_step(type(optimizer).step), optimizer)
    return [*undo, put(optimizer, "step", hooked)]


def _around(optimizer: Optimizer, plain: Any, act: Callable[..., Any]) -> Any:
    """Returns a method that has `act` call another one; learning-rate schedules take methods apart."""
    function = plain.__func__ if isinstance(plain, MethodType) else None

    @wraps(function or plain)
    def method(own: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return act(plain if function is None else partial(function, own), *args, **kwargs)

    return MethodType(method, optimizer)
