"""Looks whether ``state.json`` is as this library writes it, before anything is changed: anybody may have edited it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autovaruna.checkpoint.document import decode
from autovaruna.errors import CheckpointError

_TYPES: dict[str, type] = {"ties": dict, "optimizer": dict, "optimizer_state": dict, "generators": dict}
_NUMBERS = ("seed", "num_calls", "step")
_DOCUMENTS = ("data_position", "extra", "scaler", "lr_scheduler", "module_state", "generators", "optimizer_state")


def check_state(path: Path, state: Mapping[str, Any], tensors: Container[str]) -> None:
    """Makes sure that a state can be read to its end.

    Args:
        path: Where it is from.
        state: The content of the file.
        tensors: The names of those that it may tell of.

    Raises:
        CheckpointError: it cannot.
    """

    def read(name: str) -> Tensor:
        if name not in tensors:
            raise ValueError(f"it tells of a tensor {name!r}, which no file has")
        return torch.empty(0)

    try:
        _check_types(state)
        for key in _DOCUMENTS:
            decode(state.get(key), read)
    except KeyError as error:
        raise _edited(path, f"it lacks {error}") from error
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise _edited(path, str(error)) from error


def _check_types(state: Mapping[str, Any]) -> None:
    for key, kind in _TYPES.items():
        if not isinstance(state.get(key, kind()), kind):
            raise ValueError(f"{key} is {state[key]!r}, expected a {kind.__name__}")
    for key in _NUMBERS:
        if not isinstance(state.get(key), int | None):
            raise ValueError(f"{key} is {state[key]!r}, expected a whole number")
    if any(not isinstance(each, dict) for each in state.get("optimizer_state", {}).values()):
        raise ValueError("optimizer_state has something else than a dict for each parameter")
    if not all(isinstance(name, str) for name in state["ties"].values()):
        raise ValueError("ties has something else than names")
    if "optimizer" in state:
        known = state["optimizer"]
        names = [name for group in known["param_groups"] for name in group["params"]]
        if not all(isinstance(name, str) for name in (known["class"], *names)):
            raise ValueError("optimizer has something else than names")


def _edited(path: Path, complaint: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not as it was written: {complaint}. It has been edited; load another checkpoint, or copy the file "
        "again from where it is intact."
    )
