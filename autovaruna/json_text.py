"""Reads texts that should be JSON, however they are damaged."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """Returns what a text of JSON says.

    Raises:
        json.JSONDecodeError: it is none, or none that this Python can read.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:  # too many lists in lists, too many digits, no UTF-8
        raise json.JSONDecodeError(str(error), "", 0) from error
