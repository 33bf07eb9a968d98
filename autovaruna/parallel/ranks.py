"""Says which rank this is, for scripts that shard their data."""

from __future__ import annotations

from autovaruna.runtime.worlds.environment import get_world


def get_rank() -> int:
    """Returns the number of this rank; 0 without mpirun."""
    return get_world().rank


def get_world_size() -> int:
    """Returns the number of ranks; 1 without mpirun."""
    return get_world().num_ranks


def barrier() -> None:
    """Returns once every rank has come. Collective."""
    get_world().barrier("barrier")
