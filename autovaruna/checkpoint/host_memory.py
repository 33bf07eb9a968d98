"""Defines `HostMemory`: where a rank copies its part of a checkpoint to, so that training can go on meanwhile."""

from __future__ import annotations

from pathlib import Path

import torch

from autovaruna.checkpoint.state import RankState
from autovaruna.checkpoint.tensor_file import Rows

_UNIT_BYTES = 1 << 20


def available_bytes() -> float:
    """Returns the memory of this host that programs can have; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    known = dict(line.split(":") for line in lines)
    return 1024.0 * int(known["MemAvailable"].split()[0]) if "MemAvailable" in known else float("inf")


class HostMemory:
    """Memory on the host for a copy of a rank's part; one save after the other uses it. For CUDA it is pinned."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def missing_bytes(self, part: RankState) -> int:
        """Returns how much more memory a copy takes."""
        needed = _num_bytes(part)
        if len(self._memory) >= needed:
            return 0
        return 1 << (needed - 1).bit_length() if _is_on_cuda(part) else needed  # torch pins powers of two

    def copy(self, part: RankState) -> dict[str, Rows]:
        """Returns the files of a part from memory that nobody changes until the next copy."""
        needed, pins = _num_bytes(part), _is_on_cuda(part)
        if len(self._memory) < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first, so that there is no second one
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=pins)
        copied: dict[str, Rows] = {}
        end = 0
        for name, rows in part.files.items():
            begin = end
            for row in rows:
                end += len(row)
                self._memory[end - len(row) : end].copy_(row, non_blocking=True)
            copied[name] = [self._memory[begin:end]]
        if pins:
            torch.cuda.synchronize()
        return copied


def _num_bytes(part: RankState) -> int:
    """Returns the memory that a copy takes, with some room for a part that grows a little from save to save."""
    return -(-sum(len(row) for rows in part.files.values() for row in rows) // _UNIT_BYTES) * _UNIT_BYTES


def _is_on_cuda(part: RankState) -> bool:
    return any(row.is_cuda for rows in part.files.values() for row in rows)
