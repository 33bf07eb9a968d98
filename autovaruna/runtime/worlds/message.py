"""Defines `Message`: some tensors on the way between two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from autovaruna.runtime.worlds.hub import Event, Need
from autovaruna.runtime.worlds.world import Pending

if TYPE_CHECKING:
    from autovaruna.runtime.worlds.posting import PostingWorld


SMALL_BYTES = 4 << 10
"""Messages of so few bytes are sent at once by every MPI, without an agreement with the receiver."""


class Message(Pending):
    """A list of tensors on the way: done when all its parts are.

    Args:
        world: The ranks.
        parts: The parts that are on the way.
        event: What this rank does: ``sent`` or ``received``.
        count: How often it has done that, with these parts.
        finish: Runs when all have arrived or left.
    """

    __slots__ = ("_count", "_event", "_finish", "_parts", "_world")

    def __init__(
        self,
        world: PostingWorld,
        parts: list[Pending],
        event: Event,
        count: int,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._world = world
        self._parts = parts
        self._event = event
        self._count = count
        self._finish = finish
        for part in parts:
            if part.needs_calls:
                world.lagging.add(self)

    def is_done(self) -> bool:
        """Says whether every part has arrived or left."""
        parts = self._parts
        while parts:
            if not parts[-1].is_done():
                return False
            parts.pop()
        self._world.coming.discard(self)
        self._world.lagging.discard(self)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True

    def wait(self) -> None:
        """Blocks until every part has arrived or left."""
        if not self.is_done():
            self._world.wait_until(self.is_done, self.waiting)

    def waiting(self) -> tuple[str, tuple[Need, ...]]:
        """Says in words and for the hub what is missing: that the other rank does its part."""
        what, other, channel, tag = self._event
        if what == "sent":
            need = Need(other, ("received", self._world.rank, channel, tag), self._count)
            return f"for rank {other} to receive a message (tag {tag})", (need,)
        need = Need(other, ("sent", self._world.rank, channel, tag), self._count)
        return f"for a message of rank {other} (tag {tag})", (need,)
