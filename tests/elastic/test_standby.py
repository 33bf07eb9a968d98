"""A process that was forked to become a rank ends as any other, but sooner."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, ctypes
from autovaruna.elastic.standby import QuickEnd
end = QuickEnd()
atexit.register(lambda: print("said at the end"))
class Slow:
    def __del__(self):
        print("taken apart")
kept = Slow()
print("said", end=" ")
ctypes.CDLL(None).printf(b"by a library ")
end.status = {status}
"""


@pytest.mark.parametrize(("status", "code", "is_quick"), [(3, 3, True), (0, 0, True), (None, 0, False)])
def test_what_is_due_at_the_end_is_done(status: int | None, code: int, is_quick: bool) -> None:
    call = [sys.executable, "-c", SCRIPT.format(status=status)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and not done.stderr
    assert done.stdout.startswith("said ") and "said at the end\n" in done.stdout and "by a library" in done.stdout
    assert ("taken apart" in done.stdout) != is_quick
