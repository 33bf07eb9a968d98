"""Has a wrapped module's own `state_dict` and calls be those of the whole model, once it is split over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import ref

from torch import nn

from autovaruna._torch import OWN_CALL, call_impl
from autovaruna.api import AutoVaruna
from autovaruna.errors import RankError
from autovaruna.interception.modules import is_own_code


class _WholeState:
    """Is the ``state_dict`` of a wrapped module. A copy of the module has a plain one."""

    def __init__(self, wrapper: AutoVaruna, instead: str) -> None:
        self.plain: Callable[..., Any] = wrapper.module.state_dict
        self._wrapper, self._instead = ref(wrapper), instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapper = self._wrapper()
        if wrapper is None or not wrapper.is_split:
            return self.plain(*args, **kwargs)
        try:
            return wrapper.state_dict(*args, **kwargs)
        except RankError as error:
            raise RankError(
                f"{error} The model is split over the ranks: for the whole of it, {self._instead} on every rank."
            ) from error

    def __reduce__(self) -> Any:
        return MethodType, (self.plain.__func__, self.plain.__self__)  # type: ignore[attr-defined]


class RoutedCalls:
    """Is what calls of a module are; they are handed on unless the library itself calls. A copy has none."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], is_needed: Callable[[], bool]) -> None:
        self._module, self._call, self._is_needed = module, call, is_needed
        setattr(module, OWN_CALL, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_own_code() or not self._is_needed():
            plain: Any = call_impl
            return plain(self._module, *args, **kwargs)
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return type(None), ()


def show_whole_state(wrapper: AutoVaruna, instead: str) -> None:
    """Has the module's own ``state_dict()`` return the whole model's, collectively, once it is split.

    `instead` says in the words of the library what all ranks are to call, where one has called it alone.
    """
    wrapper.module.state_dict = _WholeState(wrapper, instead)  # type: ignore[method-assign]


def show_whole_calls(wrapper: AutoVaruna) -> None:
    """Has calls of the module be calls of its wrapper, once it is split."""
    own: Any = ref(wrapper)
    RoutedCalls(wrapper.module, lambda *args, **named: own()(*args, **named), lambda: getattr(own(), "is_split", False))
