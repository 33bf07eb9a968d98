"""Turns nested values into JSON and tensors (`encode`), and back (`decode`); refuses others, by their path.

JSON alone keeps None, booleans, integers, finite floats, texts, lists and dicts with texts as keys. Everything else
becomes an object with one key that starts with ``$``.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autovaruna.checkpoint.tensor_file import dtype_of
from autovaruna.config.files import shown
from autovaruna.errors import CheckpointError

Json = Any
_MOST_LEVELS = 100
_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
"""Arrays that torch has, too; in any order of bytes."""


def encode(value: Any, path: str, tensors: dict[str, Tensor], inside: tuple[int, ...] = ()) -> Json:
    """Returns the JSON of a value, and puts the tensors in it into `tensors`, by path.

    `path` says where the value is; `inside` are identities of the containers that it is in. Raises CheckpointError if
    something in it is of another type than numbers, texts, bytes, tensors, arrays and containers of them, or holds
    itself.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, complex | np.complexfloating):
        return {"$complex": [encode(part, path, tensors) for part in (float(value.real), float(value.imag))]}
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, tensors)
    if isinstance(value, np.ndarray) and (value.dtype.kind in "biu" or value.dtype.name in _FLOATS):
        native = np.array(value, dtype=value.dtype.newbyteorder("="))
        return {"$array": _encode_tensor(torch.from_numpy(native), path, tensors)["$tensor"]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype | torch.device):
        return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
    if id(value) in inside or len(inside) == _MOST_LEVELS:
        fault = "holds itself" if id(value) in inside else f"is in {_MOST_LEVELS} containers, one in another"
        raise CheckpointError(
            f"{path:.120}, a {type(value).__name__}, {fault}, which a checkpoint cannot hold. Expected lists, tuples "
            f"and dicts that hold neither themselves nor what they are in, in {_MOST_LEVELS} levels; take it out."
        )
    inside = (*inside, id(value))
    if type(value) in (list, tuple, torch.Size):
        items = [encode(item, f"{path}.{index}", tensors, inside) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if type(value) in (set, frozenset):
        members = [encode(item, f"a member of {path}", tensors, inside) for item in value]
        return {f"${type(value).__name__}": members}
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        return _encode_dict(value, path, tensors, inside)
    raise CheckpointError(
        f"{path} is {value!r:.80} of type {type(value).__name__}, which a checkpoint cannot hold. Expected numbers, "
        "texts, bytes, tensors, and lists, tuples, sets and dicts of them; take it out, or turn it into those."
    )


def _encode_tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> Json:
    if value.is_sparse or value.is_quantized or value.is_meta:
        raise CheckpointError(f"{path} is a tensor without plain numbers ({value.layout}, {value.device}).")
    name = path
    while name in tensors:
        name += "_"
    tensors[name] = value.detach()
    return {"$tensor": name}


def _encode_dict(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor], inside: tuple[int, ...]) -> Json:
    if isinstance(value, Counter):
        return {"$counter": [[encode(key, path, tensors, inside), count] for key, count in value.items()]}
    items = [(key, encode(item, f"{path}.{key}", tensors, inside)) for key, item in value.items()]
    if all(type(key) is str and not key.startswith("$") for key, _ in items):
        return dict(items)
    return {"$dict": [[encode(key, f"the key {key!r} of {path}", tensors, inside), item] for key, item in items]}


def decode(given: Json, read: Callable[[str], Tensor]) -> Any:
    """Returns the value that `encode` was given, in plain tuples and dicts; ValueError for other JSON."""
    if isinstance(given, list):
        return [decode(item, read) for item in given]
    if not isinstance(given, dict):
        return given
    kind = next(iter(given), "")
    if len(given) > 1 or not kind.startswith("$"):
        return {key: decode(item, read) for key, item in given.items()}
    try:
        return _SPECIAL[kind](given[kind], read)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"it holds {shown(given)}, which no checkpoint does") from error


_SPECIAL: dict[str, Callable[[Any, Callable[[str], Tensor]], Any]] = {
    "$float": lambda content, read: float(content),
    "$tensor": lambda content, read: read(content),
    "$array": lambda content, read: read(content).numpy(),
    "$bytes": lambda content, read: base64.b64decode(content),
    "$dtype": lambda content, read: dtype_of(content),
    "$device": lambda content, read: torch.device(content),
    "$tuple": lambda content, read: tuple(decode(item, read) for item in content),
    "$complex": lambda content, read: complex(*(decode(item, read) for item in content)),
    "$set": lambda content, read: {decode(item, read) for item in content},
    "$frozenset": lambda content, read: frozenset(decode(item, read) for item in content),
    "$dict": lambda content, read: {decode(key, read): decode(item, read) for key, item in content},
    "$counter": lambda content, read: Counter({decode(key, read): count for key, count in content}),
}
