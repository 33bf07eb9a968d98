"""Posts receives before they are needed, so that messages land where they will be used."""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.runtime.job import Job
from autovaruna.runtime.mail import Mail
from autovaruna.runtime.traffic import Traffic
from autovaruna.schedule.instruction import Instruction, Kind

AHEAD = 3
SMALL_AHEAD = 32
SMALL_BYTES = 1 << 20


class Posting:
    """The receives of one program: of the next few instructions, and of more while they are known to be small.

    Args:
        program: The instructions of this rank, in order.
        job: Their call.
        mail: Carries tensors.
        traffic: Knows what each instruction waits for.
    """

    def __init__(self, program: Sequence[Instruction], job: Job, mail: Mail, traffic: Traffic) -> None:
        self._program = program
        self._job = job
        self._mail = mail
        self._traffic = traffic
        self._next = 0

    def go_to(self, position: int) -> None:
        """Posts what is to be posted when instruction `position` starts."""
        end = min(position + 1 + SMALL_AHEAD, len(self._program))
        while self._next < end and (self._next <= position + AHEAD or self._is_small()):
            self._post(self._program[self._next])
            self._next += 1

    def _is_small(self) -> bool:
        """Returns whether more may be posted; what is still without layouts may become large all at once."""
        return self._mail.num_posted_bytes < SMALL_BYTES and not self._mail.awaits_layouts

    def _post(self, instruction: Instruction) -> None:
        if instruction.kind in (Kind.RECOMPUTE, Kind.WEIGHT):
            return
        part = self._job.batch.micro_batches[instruction.micro_batch]
        stage = self._job.split.stages[instruction.stage]
        is_forward = instruction.kind is Kind.FORWARD
        awaited = self._traffic.awaited_by_forward if is_forward else self._traffic.awaited_by_backward
        for kind in awaited(stage, part):
            self._mail.expect(kind)
