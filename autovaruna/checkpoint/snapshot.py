"""Takes chunks of files from tensors of a model that goes on training, before they change.

Large weights and the optimizer's state change when the optimizer steps. So they are written straight from where they
are, beside forwards and backwards. What a step comes too early for is copied before it, by a thread of its own (the
disk may hold up the one that writes), and what is left then by the step. A step waits for nobody: what a thread, of
lower priority, is taking at that moment is copied, too, and the one that writes then takes the copy. What may change
earlier (buffers), what is small, and what is not on the host, is copied at once.

That they did not change is checked by the versions that torch counts, and, for changes that it does not see, by some
of their words.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autovaruna.checkpoint.checksum import CHUNK_BYTES, Bytes
from autovaruna.checkpoint.direct import chunk_memory
from autovaruna.checkpoint.layout import Layout, bytes_of, lay_out
from autovaruna.errors import CheckpointError

SMALL_BYTES = 64 << 10
COPY_BYTES_PER_SECOND = 4e9
"""How fast copies go to memory that was used before, at the least."""
FRESH_BYTES_PER_SECOND = 1.5e9
"""The same to memory that the system has yet to give."""
_LONGEST_STRIDE = 65_521  # words; odd, so that those looked at are of all columns of a matrix; each is read from memory
_FEWEST_WORDS = 64
Chunk = tuple[str, int]


@dataclass(frozen=True)
class _Watched:
    """A tensor as it was."""

    name: str
    tensor: Tensor
    version: int
    words: np.ndarray[Any, Any]

    @staticmethod
    def of(name: str, tensor: Tensor) -> _Watched:
        return _Watched(name, tensor, tensor._version, _words(tensor))

    def has_changed(self) -> bool:
        return self.tensor._version != self.version or not np.array_equal(_words(self.tensor), self.words)


class Snapshot:
    """Files with tensors as they were when it was made.

    Args:
        files: The tensors of each file, by name.
        steady: File and name of those that change in the optimizer's step alone.
        metadata: Goes into the headers.
        seconds: Time until the optimizer's next step, as expected; None: not known.
        spare: Memory for chunks; what this snapshot used of it and more is there in the end.
    """

    def __init__(
        self,
        files: Mapping[str, Mapping[str, Tensor]],
        steady: Container[tuple[str, str]],
        metadata: Mapping[str, str],
        seconds: float | None = None,
        spare: list[Bytes] | None = None,
    ) -> None:
        self.layouts: dict[str, Layout] = {}
        self._pending: dict[Chunk, None] = {}
        self._held: dict[Chunk, Bytes] = {}
        self._watched: list[_Watched] = []
        self._spare = [] if spare is None else spare
        self._at_work: list[Chunk] = []
        self._changed: list[str] = []
        self._change = threading.Condition()
        self._deadline = None if seconds is None else time.monotonic() + seconds
        for file, tensors in files.items():
            live = {name for name, tensor in tensors.items() if (file, name) in steady and _can_stay(tensor)}
            own = {name: tensor.detach() if name in live else _copy(tensor) for name, tensor in tensors.items()}
            self.layouts[file] = layout = lay_out(own, metadata)
            self._watched += [_Watched.of(name, own[name]) for name in live]
            self._pending |= {(file, chunk): None for chunk in sorted(_chunks_of(layout, own, live))}
        self._live = frozenset(self._pending)

    def take(self, file: str, chunk: int, scratch: Bytes) -> Bytes:
        """Returns memory that begins with a chunk: `scratch`, or its own; once each, in the thread that writes."""
        key = file, chunk
        if key not in self._live:
            self.layouts[file].fill(chunk, scratch)
            return scratch
        with self._change:
            is_untouched = key in self._pending
            if is_untouched:
                del self._pending[key]
                self._at_work.append(key)
        if is_untouched:
            self._fill(key, scratch)
        with self._change:
            self._change.wait_for(lambda: key not in self._at_work)
            return scratch if is_untouched and key not in self._held else self._held.pop(key)

    def give_back(self, memory: Bytes) -> None:
        """Takes memory back that `take` returned and that was not the scratch."""
        self._spare.append(memory)

    def copy_ahead(self) -> None:
        """Copies what is left when the optimizer's next step is near, if it is known when that is."""
        with self._change:
            while self._pending and (seconds := self._seconds_to_spare()) > 0:
                self._change.wait(min(seconds, threading.TIMEOUT_MAX))
        self._hold_all()

    def wait(self) -> None:
        """Copies what is left; on return everything may change."""
        self._hold_all()
        with self._change:
            at_work = list(self._at_work)
            self._at_work += at_work
        for key in at_work:
            self._hold(key)
        with self._change:
            self._settle()

    def finish(self) -> None:
        """Says that everything has been taken.

        Raises:
            CheckpointError: a tensor was changed meanwhile, by something other than the optimizer.
        """
        with self._change:
            self._settle()
        if self._changed:
            raise CheckpointError(
                f"{', '.join(self._changed[:3])} changed while it was written in the background: got a change by "
                "something other than the optimizer's step. Call wait_checkpoint() before it, or save with "
                "background=False."
            )

    def give_up(self) -> None:
        """Lets go of everything that was not taken."""
        with self._change:
            self._pending.clear()
            self._watched.clear()
            self._change.notify_all()

    def _settle(self) -> None:
        """Looks once, before anything may change, whether something has."""
        self._changed += sorted(each.name for each in self._watched if each.has_changed())
        self._watched.clear()

    def _seconds_to_spare(self) -> float:
        """Returns for how long copies of all that is left need not begin."""
        if self._deadline is None:
            return math.inf
        fresh = max(0, len(self._pending) - len(self._spare))
        used = len(self._pending) - fresh
        seconds = CHUNK_BYTES * (used / COPY_BYTES_PER_SECOND + fresh / FRESH_BYTES_PER_SECOND)
        return self._deadline - seconds - time.monotonic()

    def _hold_all(self) -> None:
        while self._hold_one():
            pass

    def _hold_one(self) -> bool:
        """Copies the last chunk that is left to memory of its own; returns whether there was one."""
        with self._change:
            if not self._pending:
                return False
            key, _ = self._pending.popitem()
            self._at_work.append(key)
        self._hold(key)
        return True

    def _hold(self, key: Chunk) -> None:
        """Copies a chunk to memory of its own, unless another thread has done so before."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = chunk_memory()
        self._fill(key, memory, holds=True)

    def _fill(self, key: Chunk, memory: Bytes, holds: bool = False) -> None:
        """Copies a chunk that is at work."""
        file, chunk = key
        try:
            self.layouts[file].fill(chunk, memory)
            with self._change:
                if holds and key not in self._held:
                    self._held[key] = memory
                elif holds:
                    self._spare.append(memory)
        finally:
            with self._change:
                self._at_work.remove(key)
                self._change.notify_all()


def _can_stay(tensor: Tensor) -> bool:
    """Says whether a tensor is worth being written from where it is."""
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_inference()
    return is_plain and not tensor.is_conj() and tensor.numel() * tensor.element_size() >= SMALL_BYTES


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _words(tensor: Tensor) -> np.ndarray[Any, Any]:
    data = bytes_of(tensor).numpy()
    words = data[: len(data) // 8 * 8].view("<u8")
    return words[:: min(_LONGEST_STRIDE, len(words) // _FEWEST_WORDS | 1)].copy()


def _chunks_of(layout: Layout, tensors: Mapping[str, Tensor], names: Container[str]) -> set[int]:
    """Returns the chunks that some of a file's tensors have bytes in."""
    found: set[int] = set()
    for name, tensor in tensors.items():
        if name in names:
            begin = layout.places[name]
            end = begin + tensor.numel() * tensor.element_size()
            found.update(range(begin // CHUNK_BYTES, (end - 1) // CHUNK_BYTES + 1))
    return found
