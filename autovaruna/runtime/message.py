"""Defines `Message`: some tensors on the way between two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from autovaruna.runtime.hub import Need
from autovaruna.runtime.world import Pending

if TYPE_CHECKING:
    from autovaruna.runtime.connected import ConnectedWorld


class Message(Pending):
    """A list of tensors on the way: done when all its parts are."""

    def __init__(
        self,
        world: ConnectedWorld,
        parts: list[Pending],
        waiting: Callable[[], tuple[str, tuple[Need, ...]]],
        finish: Callable[[Message], None] | None = None,
    ) -> None:
        self.world = world
        self.parts = parts
        self.waiting = waiting
        self.finish = finish

    def is_done(self) -> bool:
        """Says whether every part has arrived or left."""
        parts = self.parts
        while parts:
            if not parts[-1].is_done():
                return False
            parts.pop()
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish(self)
        return True

    def wait(self) -> None:
        """Blocks until every part has arrived or left."""
        if not self.is_done():
            self.world.wait_until(self.is_done, self.waiting)
