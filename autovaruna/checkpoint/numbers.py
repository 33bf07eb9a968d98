"""Checks numbers that a script gives; imports no torch, since the launcher of `varuna/` does so, too."""

from __future__ import annotations

from typing import Any, SupportsIndex

from autovaruna.errors import InputError


def is_whole(value: Any) -> bool:
    """Says whether something is a whole number, of whatever type: also 4.0, as divisions give it."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Returns a whole number.

    Raises:
        InputError: it is none, or below `least`.
    """
    if not is_whole(value) or value < least:
        raise InputError(f"{name} is {value!r}; expected a whole number from {least} on.")
    return int(value)
