"""Says in words what an object holds, so that equal words mean that one trace serves for both."""

from __future__ import annotations

import hashlib
import re
from types import CodeType, FunctionType
from typing import Any

import numpy

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DEPTH = 3


def words(value: Any, depth: int = _DEPTH) -> str:
    """Returns what tells an object from others, the same in every process.

    That is its own text, or its attributes if the text only says where it lies in memory. Arrays (and images, tables:
    whatever turns into an array) leave numbers out of their text, so a digest of them comes with it; so it does for
    functions, by their code and what they hold.
    """
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(words(each, depth) for each in value))}}}"
    if isinstance(value, FunctionType):
        return _of_function(value, depth)
    if is_array(type(value)):
        return f"{_text(value)} {_digest_of_numbers(value)}"
    if getattr(type(value), "__repr__", None) != object.__repr__ or depth == 0:
        return _text(value)
    own = sorted(getattr(value, "__dict__", {}).items())
    return f"{type(value).__qualname__}({', '.join(f'{name}={words(each, depth - 1)}' for name, each in own)})"


def is_array(kind: type) -> bool:
    """Says whether objects of a class hold an array."""
    return hasattr(kind, "__array__") or hasattr(kind, "__array_interface__")


def _text(value: object) -> str:
    return _ADDRESS.sub("", repr(value))


def _digest_of_numbers(value: Any) -> str:
    array = numpy.asarray(value)
    data = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def _of_function(value: FunctionType, depth: int) -> str:
    """Returns the name of a function and a digest of its code; with what it holds, for two may share one code."""
    held = [cell.cell_contents for cell in value.__closure__ or ()] if depth else []
    parts = ", ".join(words(each, depth - 1) for each in [*held, *(value.__defaults__ or ())]) if depth else ""
    return f"{value.__module__}.{value.__qualname__}({parts}) {_digest_of_code(value.__code__)}"


def _digest_of_code(code: CodeType) -> str:
    constants = [each for each in code.co_consts if not isinstance(each, CodeType | frozenset)]
    inner = [_digest_of_code(each) for each in code.co_consts if isinstance(each, CodeType)]
    text = f"{code.co_code!r}{constants!r}{code.co_names!r}{inner}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
