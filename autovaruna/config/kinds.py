"""Defines the kinds of value a setting can have: how one is read from TOML, a keyword or a variable's text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex

from autovaruna.config.files import at_home
from autovaruna.errors import InputError

_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

REFUSALS = (KeyError, TypeError, ValueError)
"""What `Kind.read` and `Kind.parse` raise for a value that they do not accept."""


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        expected: what is accepted, for messages.
        read: turns a value from TOML or a keyword into the setting's; one of `REFUSALS` if it cannot.
        parse: turns the text of a variable into what `read` accepts; likewise.
    """

    expected: str
    read: Callable[[object], object]
    parse: Callable[[str], object] = str


def is_whole(value: Any) -> bool:
    """Says whether something is a whole number, of whatever type: also 4.0, as divisions give it."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Returns a whole number that a script gives.

    Raises:
        InputError: it is none, or below `least`.
    """
    if not is_whole(value) or value < least:
        raise InputError(f"{name} is {value!r}; expected a whole number from {least} on.")
    return int(value)


def count(minimum: int = 0) -> Kind:
    """Accepts whole numbers of at least `minimum`."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError
        return value

    return Kind(f"a whole number of at least {minimum}", read, int)


def number(minimum: float = 0.0, below: float = float("inf")) -> Kind:
    """Accepts numbers from `minimum` up to, not including, `below`."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value < below:
            raise ValueError
        return float(value)

    bound = "" if below == float("inf") else f" and below {below:g}"
    return Kind(f"a number of at least {minimum:g}{bound}", read, float)


def choice(*names: str) -> Kind:
    """Accepts one of some words."""

    def read(value: object) -> object:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return Kind("one of " + ", ".join(f'"{name}"' for name in names), read)


def either(first: Kind, second: Kind) -> Kind:
    """Accepts what one of two kinds accepts, the first one first."""

    def read(value: object) -> object:
        try:
            return first.read(value)
        except REFUSALS:
            return second.read(value)

    def parse(text: str) -> object:
        try:
            return first.read(first.parse(text))
        except REFUSALS:
            return second.parse(text)

    return Kind(f"{first.expected}, or {second.expected}", read, parse)


def _boolean(value: object) -> bool:
    return _BOOLEANS[str(value).strip().lower()] if isinstance(value, (bool, int, str)) else _refuse()


def _bytes(value: object) -> int:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([a-zA-Z]*)\s*", value)
        return int(float(match[1]) * _UNITS[match[2].upper()]) if match else _refuse()
    if isinstance(value, float) and value.is_integer():  # TOML's 2e9
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else _refuse()


def _path(value: object) -> str:
    return at_home(value) if isinstance(value, (str, os.PathLike)) else _refuse()


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise ValueError
    return tuple(value)


def _rank_lists(value: object) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, Mapping):
        value = [value[stage] for stage in range(len(value))]
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError
    return tuple(tuple(_rank(rank) for rank in ranks) for ranks in value)


def _rank(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else _refuse()


def _callable(value: object) -> object:
    return value if value is None or callable(value) else _refuse()


def _none(value: object) -> None:
    return None if value in (None, "auto") else _refuse()


def _refuse() -> NoReturn:
    raise ValueError


BOOLEAN = Kind("true, false, 1, 0, yes or no", _boolean)
BYTES = Kind('a number of bytes, as 2000000, "500MB" or "2GiB"', _bytes)
PATH = Kind("a path", _path)
TEXT = Kind("a text", lambda value: value if isinstance(value, str) else _refuse())
NAMES = Kind(
    "a list of names (in a variable: separated by commas)", _names, lambda text: text.split(",") if text else []
)
RANK_LISTS = Kind("a list of ranks for each stage, as [[0, 1], [2]]", _rank_lists, json.loads)
CALLABLE = Kind("a function, given as a keyword", _callable, lambda text: _refuse())
AUTO_SEED = either(count(), Kind('"auto"', _none))
