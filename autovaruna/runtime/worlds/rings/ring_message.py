"""Defines a message that comes through a ring, as a world knows messages: it can tell for what it waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from autovaruna.runtime.worlds.hub import Event
from autovaruna.runtime.worlds.message import Message
from autovaruna.runtime.worlds.rings.receiver import RingReceiver
from autovaruna.runtime.worlds.world import Blank, Brought

if TYPE_CHECKING:
    from autovaruna.runtime.worlds.posting import PostingWorld


class RingMessage(Message, Brought):
    """Tensors that come one after the other under a key.

    Args:
        world: The ranks.
        ring: Where they come from.
        key: Tells streams of messages apart.
        blanks: The layouts of the tensors.
        event: What this rank does.
        count: How often it has done that, with these tensors.
    """

    __slots__ = ("_blanks", "_key", "_ring", "tensors")

    def __init__(
        self,
        world: PostingWorld,
        ring: RingReceiver,
        key: int,
        blanks: Sequence[Blank],
        event: Event,
        count: int,
    ) -> None:
        self._world = world
        self._ring = ring
        self._key = key
        self._blanks = blanks
        self._event = event
        self._count = count
        self.tensors: list[Tensor] = []

    def is_done(self) -> bool:
        """Says whether all have come."""
        tensors = self.tensors
        while len(tensors) < len(self._blanks):
            tensor = self._ring.bring(self._blanks[len(tensors)], self._key)
            if tensor is None:
                return False
            tensors.append(tensor)
        return True
