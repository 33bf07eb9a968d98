"""Reads the fields of a JSON file that a person may have edited; every complaint names file and key."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from autovaruna.errors import DeploymentError

T = TypeVar("T")

_LARGEST = 1e18
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class Fields:
    """One JSON object of a file.

    Args:
        content: what the file has here.
        file: name of the file, for messages.
        path: keys that lead here.

    Raises:
        DeploymentError: `content` is no object.
    """

    def __init__(self, content: Any, file: str, path: str = "") -> None:
        self.file, self.path = file, path
        if not isinstance(content, dict):
            raise self.error("", f"is {_shown(content)}, expected an object")
        self.content: dict[str, Any] = content

    def error(self, key: str, complaint: str) -> DeploymentError:
        """Returns an error about a key."""
        name = ".".join(part for part in (self.path, key) if part) or "the content"
        return DeploymentError(f"the deployment {self.file} is damaged: {name} {complaint}")

    def check_keys(self, known: Collection[str]) -> None:
        """Refuses a key that means nothing here: what a person has written would be ignored."""
        for key in self.content:
            if key not in known:
                nearest = difflib.get_close_matches(key, known, 1)
                meant = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(known)}"
                raise self.error(key, f"means nothing; {meant}")

    def get(self, key: str, kind: type[T]) -> T:
        """Returns a value of that type."""
        if key not in self.content:
            raise self.error(key, "is missing: put it back, or delete the file to plan again")
        value = self.content[key]
        wanted = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"is {_shown(value)}, expected {_WORDS[kind]}")
        return kind(value)  # type: ignore[call-arg]

    def at_least(self, key: str, least: int) -> int:
        """Returns a whole number of `least` or more."""
        number = self.get(key, int)
        if number < least:
            raise self.error(key, f"is {number}, expected {least} or more")
        return number

    def amount(self, key: str, *, is_positive: bool = False, missing: float | None = None) -> float:
        """Returns a finite number that is not negative, as seconds and bytes are; `missing` if there is none."""
        if missing is not None and key not in self.content:
            return missing
        return self._checked_amount(key, self.get(key, float), is_positive)

    def amounts(self, key: str, *, is_positive: bool = True) -> tuple[float, ...]:
        """Returns a list of finite numbers above zero, or not below."""
        return tuple(self._checked_amount(key, value, is_positive) for value in self.get(key, list))

    def _checked_amount(self, key: str, value: Any, is_positive: bool) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (0 < value < _LARGEST or (value == 0 and not is_positive)):
            least = "above 0" if is_positive else "of 0 or more"
            raise self.error(key, f"is {_shown(value)}, expected {'numbers' if is_positive else 'a number'} {least}")
        return float(value)

    def one_of(self, key: str, choices: Sequence[str]) -> str:
        """Returns one of some texts."""
        value = self.get(key, str)
        if value not in choices:
            raise self.error(key, f"is {_shown(value)}, expected one of {', '.join(choices)}")
        return value

    def numbers(self, key: str) -> tuple[int, ...]:
        """Returns a list of whole numbers."""
        values = self.get(key, list)
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            raise self.error(key, f"is {_shown(values)}, expected a list of whole numbers")
        return tuple(values)

    def inside(self, key: str) -> Fields:
        """Returns the object at a key."""
        return Fields(self.get(key, dict), self.file, ".".join(part for part in (self.path, key) if part))

    def each(self, key: str) -> list[Fields]:
        """Returns the objects of a list."""
        where = ".".join(part for part in (self.path, key) if part)
        return [Fields(value, self.file, f"{where}[{k}]") for k, value in enumerate(self.get(key, list))]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
