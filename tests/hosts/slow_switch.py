"""Is a switch that delays each frame: ``slow_switch.py SECONDS``, in a network of its own, for kernels without netem.

It reads a line for each thing to do, and answers ``done``: ``plug PLACE PID`` gives the network of a process an eth0;
``cut PLACE`` and ``mend PLACE`` pull its cable out and put it in. It ends where its input does.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

TUNSETIFF, TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
MOST_BYTES, FRAMES_AT_ONCE = 65536, 64
BROADCAST_BIT = 1
COMMANDS, ANSWERS = 0, 1


@dataclass
class SlowSwitch:
    """Carries frames between taps.

    Attributes:
        delay_seconds: How long each takes.
        taps: File of each place.
        cut: Places whose cable is out.
        late: Frames under way, oldest first: when they arrive, from which place, and what they are.
        place_of: By a card's address, where it was seen.
    """

    delay_seconds: float
    taps: dict[int, int] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    late: deque[tuple[float, int, bytes]] = field(default_factory=deque)
    place_of: dict[bytes, int] = field(default_factory=dict)

    def obey(self, line: str) -> None:
        """Does what a line asks for."""
        verb, place, *rest = line.split()
        if verb == "plug":
            self._plug(int(place), rest[0])
        elif verb == "cut":
            self.cut.add(int(place))
        else:
            self.cut.discard(int(place))

    def carry(self) -> None:
        """Takes frames that hosts send."""
        for place, tap in self.taps.items():
            for _ in range(FRAMES_AT_ONCE):
                try:
                    frame = os.read(tap, MOST_BYTES)
                except OSError:  # none is there, or the host has ended
                    break
                if place not in self.cut:
                    self.late.append((time.monotonic() + self.delay_seconds, place, frame))

    def deliver(self) -> None:
        """Gives hosts the frames that have been under way for long enough."""
        while self.late and self.late[0][0] <= time.monotonic():
            _, source, frame = self.late.popleft()
            self.place_of[frame[6:12]] = source
            known = None if frame[0] & BROADCAST_BIT else self.place_of.get(frame[:6])
            for place in self.taps if known is None else [known]:
                if place != source and place not in self.cut:
                    self._send(place, frame)

    def seconds_to_next(self) -> float | None:
        """Returns when the next frame arrives, None where none is under way."""
        return max(0.0, self.late[0][0] - time.monotonic()) if self.late else None

    def _send(self, place: int, frame: bytes) -> None:
        with suppress(OSError):  # its queue is full, or it has ended: lost, as on a real cable
            os.write(self.taps[place], frame)

    def _plug(self, place: int, pid: str) -> None:
        if place in self.taps:
            os.close(self.taps.pop(place))
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", f"port{place}".encode(), TAP_WITHOUT_HEADER))
        subprocess.run(["ip", "link", "set", f"port{place}", "netns", pid, "name", "eth0"], check=True, timeout=10)
        self.taps[place] = tap
        self.cut.discard(place)


def main() -> None:
    """Serves until the input ends."""
    switch = SlowSwitch(float(sys.argv[1]))
    while True:
        ready = select.select([COMMANDS, *switch.taps.values()], [], [], switch.seconds_to_next())[0]
        if COMMANDS in ready:
            line = os.read(COMMANDS, MOST_BYTES)  # one: who sends it waits for the answer
            if not line:
                return
            switch.obey(line.decode())
            os.write(ANSWERS, b"done\n")
        switch.carry()
        switch.deliver()


if __name__ == "__main__":
    main()
