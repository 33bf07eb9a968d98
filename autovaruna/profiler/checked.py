"""Notes beside the numbers of a JSON file what they are, so that a digit that changes later is noticed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

_KEY = "checksum"


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content with its checksum, which no order of keys and no blanks change."""
    return {**content, _KEY: _checksum(content)}


def check(content: object) -> None:
    """Makes sure that content is what was written; a file of an older library says nothing of it.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(content, Mapping) or _KEY not in content:
        return
    found = _checksum({key: value for key, value in content.items() if key != _KEY})
    if content[_KEY] != found:
        raise ValueError(
            f"{_KEY} is {content[_KEY]!r}, that of the numbers is {found!r}, so some have changed since they were "
            f"written (if you have changed them, take {_KEY} out)"
        )


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"
