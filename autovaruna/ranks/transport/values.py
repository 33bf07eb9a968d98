"""Turns plain values and records of this library into bytes, and back: what ranks tell each other besides tensors.

The bytes are pickle's. Their reader makes nothing but values, so that a stranger's bytes call no function: they are a
value, or an error. (Python's documentation of `pickle`: "Restricting globals".)
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autovaruna._torch import rebuild_meta
from autovaruna.errors import AutoVarunaError, RankError

_CLASSES = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple),
    *(Counter, OrderedDict, defaultdict, deque),
    *(type(Path()), np.dtype, np.ndarray, torch.Size, torch.device),
)
_OF_NUMPY = {(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("scalar", "_reconstruct")}
_VALUES = {(each.__module__, each.__name__) for each in (*_CLASSES, rebuild_meta)} | _OF_NUMPY
_PACKAGE = __name__.partition(".")[0]


def pack(value: object) -> bytes:
    """Returns a value as bytes."""
    return pickle.dumps(value)


def unpack(data: bytes | bytearray) -> Any:
    """Returns the value whose bytes these are.

    Raises:
        RankError: they are no value that a rank sends.
    """
    try:
        return _Reader(io.BytesIO(data)).load()
    except RankError:
        raise
    except Exception as error:
        raise RankError(f"A message is no value that a rank sends: {type(error).__name__}: {error}.") from error


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _VALUES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module.partition(".")[0] == _PACKAGE and _is_record(found := super().find_class(module, name)):
            return found
        raise RankError(
            f"A message has a {module}.{name}; ranks send each other numbers, texts, tensors and collections of these. "
            "Where it is in the state of an optimizer, keep a tensor or a number there."
        )


def _is_record(found: object) -> bool:
    """Whether this is a class of ours that holds values: a dataclass, a named tuple, an enumeration or an error."""
    if not isinstance(found, type) or found.__module__.partition(".")[0] != _PACKAGE:
        return False
    is_named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    return is_named_tuple or is_dataclass(found) or issubclass(found, Enum | AutoVarunaError)
