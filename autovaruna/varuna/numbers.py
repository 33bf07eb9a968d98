"""Checks numbers that a script gives; imports no torch, since the launcher does so, too."""

from __future__ import annotations

from typing import Any, SupportsIndex

from autovaruna.errors import InputError


def positive(name: str, value: Any) -> int:
    """Returns a whole number.

    Raises:
        InputError: it is none, or below one.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex | float) or int(value) != value or value < 1:
        raise InputError(f"{name} is {value!r}; expected a whole number, at least 1.")
    return int(value)
