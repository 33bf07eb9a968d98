"""Hands frames from emulated host to host, each some time after it came, for kernels that cannot delay them.

python benchmarks/delay.py SECONDS reads lines: ``plug PLACE PID`` gives a process an eth0, ``down PLACE`` and ``up
PLACE`` pull its cable out and in. Each is answered with a line. Ends with its standard input.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from collections import deque
from subprocess import PIPE

_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x0002 | 0x1000
_AT_ONCE, _LONGEST_FRAME = 64, 1 << 16
_END_SECONDS = 60.0


class DelayingSwitch:
    """Joins hosts as a switch does that takes its time: a process that hands each frame on."""

    def __init__(self, delay_seconds: float) -> None:
        self._delay_seconds = delay_seconds

    def start(self) -> None:
        """Starts it."""
        call = ["unshare", "--net", sys.executable, __file__, str(self._delay_seconds)]
        self._process = subprocess.Popen(call, stdin=PIPE, stdout=PIPE, start_new_session=True)

    def plug(self, place: int, pid: int) -> None:
        """Gives the host of a process an eth0 that is joined to all others."""
        self._tell(f"plug {place} {pid}")

    def set_port(self, place: int, state: str) -> None:
        """Pulls a cable out (``down``), or puts it in (``up``)."""
        self._tell(f"{state} {place}")

    def close(self) -> None:
        """Ends it."""
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.communicate(timeout=_END_SECONDS)

    def _tell(self, words: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{words}\n".encode())
        self._process.stdin.flush()
        assert self._process.stdout.readline() == b"done\n", f"the switch ended at: {words}"


class Taps:
    """The ends of the hosts' cables, and the frames on their way."""

    def __init__(self, delay_seconds: float) -> None:
        self.delay_seconds = delay_seconds
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._of_place: dict[int, int] = {}
        self._is_down: set[int] = set()
        self._known: dict[bytes, int] = {}  # the tap behind an address
        self._on_the_way: deque[tuple[float, int, bytes]] = deque()

    def obey(self, line: str) -> None:
        """Does what a line says."""
        what, place, *rest = line.split()
        if what == "plug":
            self._plug(int(place), rest[0])
        elif what == "down":
            self._is_down.add(self._of_place[int(place)])
        else:
            self._is_down.discard(self._of_place[int(place)])

    def _plug(self, place: int, pid: str) -> None:
        if place in self._of_place:
            os.close(self._forget(self._of_place.pop(place)))
        tap, name = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), f"tap{place}"
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
        subprocess.run(["ip", "link", "set", "dev", name, "netns", pid, "name", "eth0"], check=True)
        self._of_place[place] = tap
        self._is_down.discard(tap)
        self._selector.register(tap, selectors.EVENT_READ)

    def _forget(self, tap: int) -> int:
        if tap in self._selector.get_map():
            self._selector.unregister(tap)
        return tap

    def serve(self) -> None:
        """Hands frames on until standard input ends."""
        while True:
            self._deliver()
            left = self._on_the_way[0][0] - time.monotonic() if self._on_the_way else None
            for key, _ in self._selector.select(None if left is None else max(0.0, left)):
                if key.fd == 0:
                    if not (line := sys.stdin.readline()):
                        return
                    self.obey(line)
                    print("done", flush=True)
                else:
                    self._take(key.fd)

    def _take(self, tap: int) -> None:
        due = time.monotonic() + self.delay_seconds
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(tap, _LONGEST_FRAME)
            except BlockingIOError:
                return
            except OSError:  # the host has gone
                self._forget(tap)
                return
            if tap not in self._is_down:
                self._known[frame[6:12]] = tap
                self._on_the_way.append((due, tap, frame))

    def _deliver(self) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            _, source, frame = self._on_the_way.popleft()
            known, taps = self._known.get(frame[:6]), self._of_place.values()
            for tap in [known] if known in taps else [each for each in taps if each != source]:
                if tap not in self._is_down:
                    try:
                        os.write(tap, frame)
                    except OSError:  # its queue is full, or the host has gone: a network loses frames
                        continue


if __name__ == "__main__":
    Taps(float(sys.argv[1])).serve()
