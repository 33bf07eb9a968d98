"""Orders what waits for one another: sets that are joined, what waits both ways, and what is free before the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Behind = Mapping[T, Collection[T]]
"""For each of some things, those that wait for it."""


class Sets(Generic[T]):
    """Things of which each is alone until it is joined with others; ``sets[thing]`` stands for all of its set."""

    def __init__(self, things: Iterable[T]) -> None:
        self._above = {each: each for each in things}

    def __getitem__(self, thing: T) -> T:
        above = self._above
        while (next_above := above[thing]) is not thing:
            above[thing] = thing = above[next_above]
        return thing

    def join(self, things: Iterable[T]) -> None:
        """Makes one set of those of some things."""
        first, *others = (self[each] for each in things)
        for each in others:
            self._above[each] = first


def waiting_both_ways(behind: Behind[T]) -> list[list[T]]:
    """Returns the greatest groups of several things that all wait for one another.

    Reference: M. Sharir, "A strong-connectivity algorithm and its applications in data flow analysis", Computers &
    Mathematics with Applications 7 (1981), doi:10.1016/0898-1221(81)90008-0.
    """
    before: dict[T, list[T]] = {each: [] for each in behind}
    for each, waiting in behind.items():
        for other in waiting:
            before[other].append(each)
    seen: set[T] = set()
    groups = [_by_end([start], before, seen) for start in reversed(_by_end(behind, behind, set()))]
    return [group for group in groups if len(group) > 1]


def free_first(behind: Behind[T], key: Callable[[T], int]) -> list[T]:
    """Returns things so that none comes before what it waits for; of those that may, the one with the least key."""
    awaited = dict.fromkeys(behind, 0)
    for waiting in behind.values():
        for each in waiting:
            awaited[each] += 1
    free = [(key(each), each) for each, number in awaited.items() if not number]
    heapify(free)
    order: list[T] = []
    while free:
        order.append(heappop(free)[1])
        for each in behind[order[-1]]:
            awaited[each] -= 1
            if not awaited[each]:
                heappush(free, (key(each), each))
    assert len(order) == len(behind), "some things wait for one another"
    return order


def _by_end(starts: Iterable[T], behind: Behind[T], seen: set[T]) -> list[T]:
    """Returns starts and what is behind them, but what was seen, each after all that a search in depth then finds."""
    order: list[T] = []
    for start in starts:
        path = [] if start in seen else [(start, iter(behind[start]))]
        seen.add(start)
        while path:
            following = next((each for each in path[-1][1] if each not in seen), None)
            if following is None:
                order.append(path.pop()[0])
            else:
                seen.add(following)
                path.append((following, iter(behind[following])))
    return order
