"""Posts receives before they are needed, so that messages land where they will be used.

Posting takes time, too. So as a rule a rank does it while it waits for a message.
"""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.runtime.mail import Mail
from autovaruna.runtime.traffic import Act

AHEAD = 3
SMALL_AHEAD = 32
SMALL_BYTES = 1 << 20


class Posting:
    """The receives of one program: of the next few instructions, and of more while they are known to be small.

    Args:
        program: The instructions of this rank, in order.
        mail: Carries tensors.

    Attributes:
        due: the first position that more has to be posted for.
    """

    def __init__(self, program: Sequence[Act], mail: Mail) -> None:
        self._program = program
        self._mail = mail
        self._next = 0
        self._position = 0
        self.due = 0

    def go_to(self, position: int, ahead: int = AHEAD) -> None:
        """Posts what has to be when instruction `position` starts, and what the next ones receive."""
        self._position = position
        end = min(position + 1 + ahead, len(self._program))
        while self._next < end:
            self._post_next()
        self.due = self._next - AHEAD

    def go_ahead(self) -> None:
        """Posts what may be."""
        end = min(self._position + 1 + SMALL_AHEAD, len(self._program))
        while self._next < end and self._is_small():
            self._post_next()
        self.due = self._next - AHEAD

    def _post_next(self) -> None:
        for parcel in self._program[self._next].receives:
            self._mail.expect(parcel.kind)
        self._next += 1

    def _is_small(self) -> bool:
        """Returns whether more may be posted; what is still without layouts may become large all at once."""
        return self._mail.num_posted_bytes < SMALL_BYTES and not self._mail.awaits_layouts
