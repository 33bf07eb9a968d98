"""Says in words what ranks have in another way than rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def differences(of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Returns in words what the first rank that differs from rank 0 has in another way; empty: nothing."""
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            return "; ".join(
                f"{name} is {first.get(name, 'missing')} on rank 0, {other.get(name, 'missing')} on rank {rank}"
                for name in names[:5]
            )
    return ""
