"""Defines `Message`: some tensors on the way between two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from autovaruna.runtime.hub import Event, Need
from autovaruna.runtime.world import Pending

if TYPE_CHECKING:
    from autovaruna.runtime.connected import ConnectedWorld


def drain(parts: list[Pending]) -> bool:
    """Takes what is done out of a list, from its end; says whether nothing is left."""
    while parts and parts[-1].is_done():
        parts.pop()
    return not parts


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
        world: ConnectedWorld,
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

    def is_done(self) -> bool:
        """Says whether every part has arrived or left."""
        if not drain(self._parts):
            return False
        self._world.coming.discard(self)
        self._world.large.discard(self)
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
