"""Shares work that other threads can run beside among a few of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(act: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Returns what `act` returns of each item; a thread has its share from the start, and wakes no other meanwhile."""
    number = max(1, min(len(items), num_threads()))
    with ThreadPoolExecutor(number) as pool:
        shares = list(pool.map(lambda first: [act(item) for item in items[first::number]], range(number)))
    return [shares[place % number][place // number] for place in range(len(items))]


def num_threads() -> int:
    """Returns how many threads a rank reads and sums files with."""
    return max(2, min(8, torch.get_num_threads()))
