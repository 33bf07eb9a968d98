"""Lets a model be traced with idioms that torch.export takes for something else."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from autovaruna._torch import check
from autovaruna.graph.exporting.contractions import ordered_by_numbers
from autovaruna.graph.exporting.integers import integers_of_sizes

_LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div", "poisson_nll_loss"),
    *("binary_cross_entropy_with_logits", "soft_margin_loss"),
)


def _of_one_length(loss: Callable[..., Any], tracing: int) -> Callable[..., Any]:
    """Returns a loss that says to the trace on a thread that its tensors are of one shape, where only data can tell."""

    @wraps(loss)
    def call(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if get_ident() == tracing and isinstance(input, Tensor) and isinstance(target, Tensor):
            for one, other in zip(input.shape, target.shape, strict=False):
                if _is_of_data(one) and _is_of_data(other):
                    check(one == other)  # type: ignore[no-untyped-call]
        return loss(input, target, *args, **kwargs)

    return call


def _by_bytes(where: Callable[..., Any], place: int, tracing: int) -> Callable[..., Any]:
    """Returns a choice that takes a condition of bytes (argument `place`) for booleans, as plain PyTorch does."""

    @wraps(where)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("condition")
        if get_ident() == tracing and isinstance(given, Tensor) and given.dtype is torch.uint8:
            if len(args) > place:
                args = (*args[:place], given.bool(), *args[place + 1 :])
            else:
                kwargs["condition"] = given.bool()
        return where(*args, **kwargs)

    return call


def _is_of_data(length: Any) -> bool:
    return isinstance(length, torch.SymInt) and not length.node.has_hint()


@contextmanager
def idioms(integers: Collection[str]) -> Iterator[set[str]]:
    """Traces ``len(x)`` as ``x.shape[0]``, which fixes no batch size, and leaves checks of distributions out.

    Losses of two tensors take it for granted that what masks have picked of both is of one length. A condition of bytes
    is one of booleans. Products of several tensors are ordered by numbers. ``int`` leaves sizes as they are in some
    modules of Python (`integers`, by name).

    For this thread, while the context lasts; checks of distributions for all threads, since torch has one switch.

    Yields:
        The names of other modules in which such an ``int`` has been missing.
    """
    tracing, plain = get_ident(), builtins.len
    checks = Distribution._validate_args

    def length(value: Any, /) -> Any:
        if isinstance(value, Tensor) and get_ident() == tracing and value.dim():
            return value.shape[0]
        return plain(value)

    builtins.len = length
    Distribution.set_default_validate_args(False)
    losses = [(nn.functional, name, _of_one_length(getattr(nn.functional, name), tracing)) for name in _LOSSES]
    choices = [
        (torch, "where", _by_bytes(torch.where, 0, tracing)),
        (Tensor, "where", _by_bytes(Tensor.where, 1, tracing)),
    ]
    contractions: Any = torch.backends.opt_einsum.m  # type: ignore[attr-defined]
    orders = [(contractions, "get_opt_einsum", ordered_by_numbers(contractions.get_opt_einsum))]
    others = [(*each, getattr(*each[:2])) for each in (*losses, *choices, *orders)]
    for holder, name, traced, _ in others:
        setattr(holder, name, traced)
    try:
        with integers_of_sizes(integers) as missing:
            yield missing
    finally:
        for holder, name, _, own in others:
            setattr(holder, name, own)
        builtins.len = plain
        Distribution.set_default_validate_args(checks)
