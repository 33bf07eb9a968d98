"""Files are written whole, and what is no file stays what it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autovaruna.config.files import check_writable, write_whole
from autovaruna.errors import ConfigError


def test_what_is_no_file_is_written_to_and_stays_and_so_does_a_link_to_one(tmp_path: Path) -> None:
    """A deployment that root saved to /dev/null once took its place."""
    pipe, target, link = (tmp_path / name for name in ("pipe", "file", "link"))
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable("--output", pipe)
    write_whole(pipe, "text")
    assert pipe.is_fifo() and os.read(end, 10) == b"text"
    os.close(end)
    link.symlink_to(target)
    write_whole(link, "text")
    assert link.is_symlink() and target.read_text() == "text"


def test_who_may_read_a_file_is_as_the_umask_or_the_old_file_says(tmp_path: Path) -> None:
    """Once, it was everybody, whatever either said."""
    for umask, mode in ((0o077, 0o600), (0o002, 0o664)):
        before = os.umask(umask)
        try:
            write_whole(tmp_path / str(mode), "text")
        finally:
            os.umask(before)
        assert (tmp_path / str(mode)).stat().st_mode & 0o777 == mode
        write_whole(tmp_path / str(mode), "another")
        assert (tmp_path / str(mode)).stat().st_mode & 0o777 == mode
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(0o600), str(0o664)]


def test_places_that_cannot_be_written_are_named_and_to_look_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable("--output", tmp_path / "new" / "folder" / "file")
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path, file / "below", Path("/proc/none.json")):
        with pytest.raises(ConfigError, match=f"--output is {path}, which cannot be written: "):
            check_writable("--output", path)
