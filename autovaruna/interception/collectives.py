"""Has ranks meet before collectives of torch.distributed, which wait in silence for ranks that are elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from threading import current_thread, main_thread
from typing import Any

import torch.distributed as dist

from autovaruna.interception.installed import Undo, put_all
from autovaruna.interception.modules import is_own_code

_NAMES = (
    *("barrier", "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast"),
    *("broadcast_object_list", "reduce", "gather", "gather_object", "scatter"),
)


def watch_collectives(meet: Callable[[str], None]) -> Undo:
    """Has `meet` called with the words for each collective of the default group, before it begins."""
    return put_all(*((dist, name, _meeting(name, getattr(dist, name), meet)) for name in _NAMES))


def _meeting(name: str, function: Callable[..., Any], meet: Callable[[str], None]) -> Callable[..., Any]:
    known = signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_own_code() and current_thread() is main_thread():
            group = known.bind_partial(*args, **kwargs).arguments.get("group")
            if group is None or group is dist.group.WORLD:
                meet(f"torch.distributed.{name}()")
        return function(*args, **kwargs)

    return call
