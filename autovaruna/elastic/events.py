"""Tells what happens to a job: a line that a person can read, and a line of JSON in a file."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Any


class EventLog:
    """The events of one job.

    Args:
        path: A file that gets a line of JSON for each; None: none does.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path

    def note(self, what: str, text: str, **details: Any) -> None:
        """Notes an event.

        Args:
            what: Its kind, one word.
            text: What happened, for a person.
            details: More of it, for programs.
        """
        sys.stderr.write(f"autovaruna: {text}\n")
        sys.stderr.flush()
        if self._path is not None:
            line = json.dumps({"time": round(time.time(), 3), "event": what, "text": text, **details})
            with suppress(OSError), open(self._path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
