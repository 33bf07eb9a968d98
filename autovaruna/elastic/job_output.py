"""Defines `JobOutput`: passes on what an mpirun writes, and learns from it which ranks run and how each has ended."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import IO

from autovaruna.elastic import stub
from autovaruna.elastic.rank_script import STARTED

_SILENT_SECONDS = 2.0  # how long the output of an mpirun that has ended may be silent and still go on
_TAG = re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>: ?")
_END = re.compile(rf"(?:{_TAG.pattern})?{stub.ENDED}(?P<rank>\d+) (?P<status>-?\d+)")
_START = re.compile(rf"{_END.pattern}|{_TAG.pattern}")


class JobOutput:
    """Follows the streams of an mpirun; calls `on_start` once a rank runs, and `on_end` for each that ends.

    Attributes:
        started: the ranks that have run.
        ended: the status of each rank that has ended, negative for a signal, in the order of their ends.
    """

    def __init__(
        self, on_start: Callable[[], None], on_end: Callable[[int, int], None] = lambda rank, status: None
    ) -> None:
        self.started: set[int] = set()
        self.ended: dict[int, int] = {}
        self._num_read = dict[int, int]()
        self._num_passed_on = dict[int, int]()
        self._on_start = on_start
        self._on_end = on_end
        self._threads: list[threading.Thread] = []

    @property
    def has_started(self) -> bool:
        """Whether a rank has run."""
        return bool(self.started)

    def follow(self, stream: IO[bytes], target: IO[str]) -> None:
        """Starts to pass the lines of a stream on."""
        number = len(self._threads)
        self._num_read[number] = self._num_passed_on[number] = 0
        thread = threading.Thread(target=self._pump, args=(stream, target, number), daemon=True)
        thread.start()
        self._threads.append(thread)

    def wait(self) -> None:
        """Waits until the streams end, or are silent: what a killed mpirun has left may hold them open."""
        known: dict[int, int] = {}
        while not known or known != self._num_read or known != self._num_passed_on:
            known, deadline = self._num_read.copy(), time.monotonic() + _SILENT_SECONDS
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            if not any(thread.is_alive() for thread in self._threads):
                return

    def _pump(self, stream: IO[bytes], target: IO[str], number: int) -> None:
        with stream:
            for line in stream:
                self._num_read[number] += 1
                for piece in pieces_of(line.decode(errors="replace")):
                    shown = self._shown(piece)
                    if shown is not None:
                        show(target, shown)
                self._num_passed_on[number] += 1

    def _shown(self, line: str) -> str | None:
        """Returns a line as it is shown: ``[rank] text``; words of mpirun itself stay as they are."""
        if end := _END.match(line):  # without a tag, if another rank has written since this one's last line began
            rank, status = int(end["rank"]), int(end["status"])
            self.ended[rank] = status
            self._on_end(rank, status)
            return None
        tag = _TAG.match(line)
        if tag is None:
            return line
        text = line[tag.end() :]
        if text == "\0":  # mpirun ends its words about an abort with it
            return None
        before, mark, _ = text.partition(STARTED)  # whatever Python itself has written before it
        if mark:
            is_first = not self.started
            self.started.add(int(tag[1]))
            if is_first:
                self._on_start()
            return f"[{tag[1]}] {before}\n" if before else None
        return f"[{tag[1]}] {text}"


def pieces_of(line: str) -> list[str]:
    """Returns the lines in a line of mpirun's: one of a rank that has no end is followed by another's at once."""
    starts = [0, *(each.start() for each in _START.finditer(line) if each.start()), len(line)]
    found = [line[start:stop] for start, stop in pairwise(starts)]
    return [*(f"{piece}\n" for piece in found[:-1]), *found[-1:]]


def show(target: IO[str] | None, text: str) -> None:
    """Writes and flushes a text; once nobody reads a stream any more, all that follows is dropped."""
    if target is None:  # closed before this process began
        return
    try:
        try:
            target.write(text)
        except UnicodeEncodeError as error:
            target.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        target.flush()
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), target.fileno())
        if target is not sys.stderr:
            show(sys.stderr, f"run_varuna: the output is lost from here on: {error}\n")
