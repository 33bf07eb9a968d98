"""Passes the output of a job on, line by line, with the rank in front."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import IO

from autovaruna.varuna.rank_script import STARTED

_TAG = re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>: ?")


class Output:
    """Follows the streams of an mpirun; `has_started` says whether a rank has run.

    Args:
        on_start: Called once, when the first one has.
    """

    def __init__(self, on_start: Callable[[], None]) -> None:
        self.has_started = False
        self._on_start = on_start
        self._threads: list[threading.Thread] = []

    def follow(self, stream: IO[bytes], target: IO[str]) -> None:
        """Starts to pass the lines of a stream on."""
        thread = threading.Thread(target=self._pump, args=(stream, target), daemon=True)
        thread.start()
        self._threads.append(thread)

    def wait(self) -> None:
        """Returns when the streams have ended."""
        for thread in self._threads:
            thread.join()

    def _pump(self, stream: IO[bytes], target: IO[str]) -> None:
        is_lost = False  # the stream is read to its end all the same, or the job would stand still
        for line in stream:
            for piece in pieces_of(line.decode(errors="replace")):
                shown = self._shown(piece)
                if shown is not None and not is_lost:
                    is_lost = not _write(target, shown)

    def _shown(self, line: str) -> str | None:
        """Returns a line as it is shown: ``[rank] text``; words of mpirun itself stay as they are."""
        tag = _TAG.match(line)
        if tag is None:
            return line
        text = line[tag.end() :]
        if text == "\0":  # mpirun ends its words about an abort with it
            return None
        if text.rstrip("\r\n") == STARTED:
            if not self.has_started:
                self.has_started = True
                self._on_start()
            return None
        return f"[{tag[1]}] {text}"


def pieces_of(line: str) -> list[str]:
    """Returns the lines in a line of mpirun's: where a rank's last one has no end, that of another follows at once."""
    starts = [0, *(tag.start() for tag in _TAG.finditer(line) if tag.start()), len(line)]
    found = [line[start:stop] for start, stop in pairwise(starts)]
    return [*(f"{piece}\n" for piece in found[:-1]), *found[-1:]]


def _write(target: IO[str], text: str) -> bool:
    """Writes and flushes a text; returns False if nobody reads it any more."""
    try:
        try:
            target.write(text)
        except UnicodeEncodeError as error:
            target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        target.flush()
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"run_varuna: the output is lost from here on: {error}\n")
        return False
    return True
