"""Finds and reads the files of the conf directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tomli

from autovaruna.errors import ConfigError

CONF_DIR_VARIABLE = "AUTOVARUNA_CONF_DIR"
PACKAGED = Path(__file__).parent / "conf"


def conf_dir(environ: Mapping[str, str]) -> Path:
    """Returns the user's conf directory, which exists only if the environment names it.

    Raises:
        ConfigError: the directory that the environment names does not exist, or there is no home directory.
    """
    named = environ.get(CONF_DIR_VARIABLE)
    if not named:
        return _at_home()
    path = Path(named).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{CONF_DIR_VARIABLE}={named}: there is no such directory; create it or unset the variable")
    return path


def _at_home() -> Path:
    try:
        return Path("~/.autovaruna").expanduser()
    except RuntimeError as error:
        raise ConfigError(
            "This user has no home directory: HOME is not set, and the system knows none. Set HOME, or set "
            f"{CONF_DIR_VARIABLE} to a directory for settings and measurements."
        ) from error


def read_toml(path: Path) -> dict[str, object]:
    """Returns the content of a TOML file, empty if there is no such file.

    Raises:
        ConfigError: the file cannot be read or is not TOML; the message has the file and line.
    """
    try:
        with path.open("rb") as file:
            return tomli.load(file)
    except FileNotFoundError:
        return {}
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not TOML: {error.msg}; correct the line") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text; correct the line") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; make it readable or remove it") from error
