"""Has ranks meet before collectives of torch.distributed, which wait in silence for ranks that are elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from threading import current_thread, main_thread
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autovaruna._torch import pytree
from autovaruna.errors import InputError
from autovaruna.interception.installed import Undo, put_all
from autovaruna.interception.modules import is_own_code

_NAMES = (
    *("barrier", "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast"),
    *("broadcast_object_list", "reduce", "gather", "gather_object", "scatter"),
)


def watch_collectives(meet: Callable[[str], None], num_ranks: int) -> Undo:
    """Has `meet` called with the words for each collective of a default group of all ranks, before it begins."""
    return put_all(*((dist, name, _meeting(name, getattr(dist, name), meet, num_ranks)) for name in _NAMES))


def _meeting(name: str, function: Any, meet: Callable[[str], None], num_ranks: int) -> Callable[..., Any]:
    known = signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_of_all = dist.is_initialized() and dist.get_world_size() == num_ranks
        if is_of_all and not is_own_code() and current_thread() is main_thread():
            group = known.bind_partial(*args, **kwargs).arguments.get("group")
            if group is None or group is dist.group.WORLD:
                _refuse_elsewhere(name, (args, kwargs))
                meet(f"torch.distributed.{name}()")
        return function(*args, **kwargs)

    return call


def _refuse_elsewhere(name: str, given: object) -> None:
    """Refuses weights and gradients of a split model that other ranks hold: the others would wait for their numbers."""
    if any(isinstance(each, Tensor) and each.is_meta for each in pytree.tree_leaves(given)):
        raise InputError(
            f"torch.distributed.{name}(): got a weight or a gradient that other ranks hold (is_meta). After backward() "
            "gradients are those of all ranks, and weights are those of one model. Expected a script that leaves their "
            "sums, means and broadcasts out; for whole weights, call model.state_dict() on every rank."
        )
