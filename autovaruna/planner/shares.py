"""Shares the optimizer's state of parameters out over the ranks that hold them (ZeRO stage 1).

A whole parameter has one owner, so that any optimizer may step that updates parameters by themselves.
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.1; theirs
are equal ranges of elements.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def share_out(num_bytes: Mapping[str, float], holders: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Returns the owner of each parameter: the largest first, to the holder that owns least so far.

    The rank that owns most owns at most 4/3 of what it would in the best division, with equal holders. (Graham, "Bounds
    on multiprocessing timing anomalies", 1969, theorem 3.)

    Args:
        num_bytes: Of each parameter that is trained.
        holders: The ranks that hold it.
    """
    owned: Counter[int] = Counter()
    owners: dict[str, int] = {}
    for name in sorted(num_bytes, key=lambda name: (len(holders[name]) > 1, -num_bytes[name], name)):
        owners[name] = min(holders[name], key=lambda rank: (owned[rank], rank))
        owned[owners[name]] += num_bytes[name]  # type: ignore[assignment]
    return {name: owner for name, owner in owners.items() if len(holders[name]) > 1}
