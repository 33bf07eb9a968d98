"""Defines `Kept`: where lies what a block keeps until its backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """Places of values and small pieces that a block keeps, and of what else it has taken."""

    places: list[int]
    rest: list[list[int]]

    @property
    def all_places(self) -> list[int]:
        """All of it."""
        return self.places + [place for each in self.rest for place in each]
