"""Defines `Instruction`: one act of one rank. A schedule is data: for each rank, its instructions in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """What an instruction does; the value is its letter in print (``2F0`` is stage 2, forward, micro-batch 0)."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    WEIGHT = "W"

    __hash__ = str.__hash__
    """That of `Enum` is a function of Python's, and every instruction of a step is looked up by its kind."""


FORWARD, RECOMPUTE, BACKWARD, WEIGHT = Kind
"""Where each instruction of a step asks for them: as an attribute of an `Enum` they take ten times as long."""


@dataclass(frozen=True, slots=True, order=True)
class Instruction:
    """One act: a kind of work, at a stage, for a micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


Schedule = tuple[tuple[Instruction, ...], ...]
