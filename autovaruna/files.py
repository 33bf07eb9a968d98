"""Writes files whole, and tells beforehand whether they can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from autovaruna.errors import ConfigError
from autovaruna.kinds import at_home


def write_whole(path: str | os.PathLike[str], text: str, *, is_synced: bool = True) -> None:
    """Writes a text, and makes the folder if need be: the file is the old one or the new one, never half of it.

    What is no file, as a pipe or ``/dev/null``, is written to and stays what it is. Unless it is synced, the file may
    be lost with the machine's power.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(at_home(path)).resolve()
    if _is_special(target):
        target.write_text(text, encoding="utf-8")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_writable(option: str, path: str | os.PathLike[str]) -> None:
    """Makes sure that a file can be written, before what takes long; leaves nothing behind.

    Args:
        option: Names it, for the message.
        path: The file; its folder need not be there.

    Raises:
        ConfigError: it cannot be.
    """
    target = Path(at_home(path)).resolve()
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if not _is_special(target):
            folder = next(each for each in target.parents if each.exists())
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise ConfigError(
            f"{option} is {path}, which cannot be written: {error.strerror or error}; expected a file in a folder that "
            "can be written to"
        ) from error


def _is_special(target: Path) -> bool:
    """Returns whether something is there that no file may take the place of."""
    return target.exists() and not target.is_file()
