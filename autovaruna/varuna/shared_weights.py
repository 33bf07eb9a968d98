"""Ties parameters that a user names in pairs: afterwards they are one parameter under several names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from difflib import get_close_matches

import torch
from torch import nn

from autovaruna.errors import InputError

logger = logging.getLogger(__name__)


def tie(model: nn.Module, pairs: Sequence[tuple[str, str]] | None) -> None:
    """Ties the parameters of each pair, in place; the first name's numbers stay.

    Pairs may form chains. Tied parameters get one gradient, the sum over all their uses, whatever stages these are on.

    Args:
        model: The model.
        pairs: Names of parameters.

    Raises:
        InputError: a name is no parameter, or a pair differs in shape or dtype.
    """
    for pair in pairs or ():
        if isinstance(pair, str) or len(pair) != 2:
            raise InputError(f"shared_weights holds {pair!r}; expected pairs of parameter names.")
        first, second = (_parameter(model, name) for name in pair)
        if first is not second:
            _check(pair, first, second)
            _replace(model, second, first)


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    known = dict(model.named_parameters(remove_duplicate=False))
    if name not in known:
        near = get_close_matches(name, known, 3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise InputError(f"shared_weights names {name!r}, which is no parameter of {type(model).__name__}{hint}")
    return known[name]


def _check(pair: Sequence[str], first: nn.Parameter, second: nn.Parameter) -> None:
    if first.shape != second.shape or first.dtype != second.dtype:
        raise InputError(
            f"shared_weights ties {pair[0]} {tuple(first.shape)} {first.dtype} and {pair[1]} {tuple(second.shape)} "
            f"{second.dtype}; expected two parameters of one shape and dtype."
        )
    if not first.is_meta and not second.is_meta and not torch.equal(first, second):
        logger.warning("%s and %s are tied, but differ: the numbers of %s stay", pair[0], pair[1], pair[0])


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
