"""Reads and writes small files: the conf directory's TOML, and JSON records by the types of their fields."""

from __future__ import annotations

import difflib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import tomli

from autovaruna.errors import ConfigError

CONF_DIR_VARIABLE = "AUTOVARUNA_CONF_DIR"
PACKAGED = Path(__file__).parents[1] / "conf"
_CHECKSUM = "checksum"
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def at_home(path: str | os.PathLike[str]) -> str:
    """Returns a path with the user's directory in place of ``~``, which shells leave alone in ``--option=~/file``."""
    return os.path.expanduser(os.fspath(path))


def copy_synced(source: Path, target: Path) -> None:
    """Copies a file to the disk."""
    shutil.copyfile(source, target)
    with open(target, "rb+") as file:
        os.fsync(file.fileno())


def system_bytes(file: str, name: str) -> float | None:
    """Returns a number of bytes that a file of the system has in kB, as /proc/meminfo; None: it does not say."""
    try:
        lines = Path(file).read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def write_whole(path: str | os.PathLike[str], text: str, *, is_synced: bool = True) -> None:
    """Writes a text, and makes the folder if need be: the file is the old one or the new one, never half of it.

    What is no file, as a pipe or ``/dev/null``, is written to and stays what it is. Who may read it stays as it was; of
    a new file the umask says so. Unless it is synced, the file may be lost with the machine's power.
    """
    target = Path(at_home(path)).resolve()
    if _is_special(target):
        target.write_text(text, encoding="utf-8")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with open(new, "x", encoding="utf-8") as file:
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(text)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, target)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def check_writable(option: str, path: str | os.PathLike[str]) -> None:
    """Raises ConfigError if a file cannot be written, before what takes long; leaves nothing behind."""
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


def conf_dir(environ: Mapping[str, str]) -> Path:
    """Returns the user's conf directory, and makes one that the environment names; ConfigError if it cannot."""
    named = environ.get(CONF_DIR_VARIABLE)
    if not named:
        try:
            return Path("~/.autovaruna").expanduser()
        except RuntimeError as error:
            raise ConfigError(
                "This user has no home directory: HOME is not set, and the system knows none. Set HOME, or set "
                f"{CONF_DIR_VARIABLE} to a directory for settings and measurements."
            ) from error
    try:
        path = Path(named).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        return path
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{CONF_DIR_VARIABLE}={named} is no directory, and none can be made there: "
            f"{getattr(error, 'strerror', None) or error}; name another one or unset the variable"
        ) from error


def read_toml(path: Path) -> dict[str, object]:
    """Returns what a TOML file says, empty if there is none; ConfigError, with file and line, if it cannot be read."""
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
    except (ValueError, RecursionError) as error:  # a number of too many digits, or lists in lists in lists
        raise ConfigError(f"{path} cannot be read: {error}; correct it") from error


def shown(value: object) -> str:
    """Returns a value as errors show it, which is not at length."""
    try:
        return f"{value!r:.200}"
    except ValueError:  # Python writes no numbers of so many digits
        return f"a {type(value).__name__} that is too long to be shown"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns what errors add about a name that is like one of those that are known; empty: it is like none."""
    nearest = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


Record = TypeVar("Record")
Amount = Annotated[float, msgspec.Meta(ge=0, lt=1e18)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e18)]
Rate = Annotated[float, msgspec.Meta(gt=0)]  # infinite where there is nothing to send
Count = Annotated[int, msgspec.Meta(ge=1, lt=10**18)]
Whole = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]


def parse(text: str | bytes) -> Any:
    """Returns what a text of JSON says; json.JSONDecodeError if it is none, or none that this Python can read."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:  # too many lists in lists, too many digits, no UTF-8
        raise json.JSONDecodeError(str(error), "", 0) from error


def read_record(content: Any, kind: type[Record]) -> Record:
    """Returns the record (dataclass or Struct) that parsed JSON holds; else ValueError, with key, got, expected."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_complaint(str(error), content, kind)) from error


def write_record(path: str | os.PathLike[str], record: Any, *, is_synced: bool = True) -> None:
    """Writes a dataclass with a checksum, which no order of keys and no blanks change; OSError if it cannot."""
    content = asdict(record)
    text = json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=1)
    write_whole(path, text + "\n", is_synced=is_synced)


def load_record(path: str | os.PathLike[str], kind: type[Record]) -> Record:
    """Reads what `write_record` has written; OSError if it cannot be read, ValueError if it is not such a record."""
    try:
        content = parse(Path(at_home(path)).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON (line {error.lineno}, column {error.colno}: {error.msg})") from error
    return read_record(_checked(content), kind)


def _checked(content: Any) -> Any:
    """Returns the content without its checksum, if that is right or somebody has taken it out."""
    if not isinstance(content, Mapping) or _CHECKSUM not in content:
        return content
    rest = {key: value for key, value in content.items() if key != _CHECKSUM}
    if content[_CHECKSUM] != _checksum(rest):
        raise ValueError(
            f"{_CHECKSUM} is {content[_CHECKSUM]!r}, that of the numbers is {_checksum(rest)!r}, so some have changed "
            f"since they were written (if you have changed them, take {_CHECKSUM} out)"
        )
    return rest


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _complaint(message: str, content: Any, kind: Any) -> str:
    """Returns a complaint of msgspec, as "Expected `int`, got `str` - at `$.stages[0].cut`", in our words."""
    what, _, place = message.partition(" - at `$")
    place = place.rstrip("`").lstrip(".")
    field = re.search("field `(.*)`", what)
    if field:
        key = ".".join(part for part in (place, field[1]) if part)
        return f"{key} is missing" if "missing" in what else f"{key} is unknown{_meant(field[1], place, kind)}"
    value = _at(content, place)
    if "enum" in what:
        return f"{place} is {value!r}, expected {' or '.join(_info_at(kind, place).values)}"
    expected = re.sub("`([a-z]+)`", lambda match: _WORDS.get(match[1], match[1]), what.partition(", got")[0])
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    expected = re.sub(r" >= ([0-9]+)(\.0)?", r" of \1 or more", re.sub(r" > ([0-9]+)(\.0)?", r" above \1", expected))
    return f"{place or 'the content'} is {shown}, {expected[0].lower()}{expected[1:]}"


def _meant(name: str, place: str, kind: Any) -> str:
    """Returns which key may have been meant by one that the record at a place does not have."""
    known = [each.encode_name for each in _info_at(kind, place).fields]
    return did_you_mean(name, known) or f"; expected one of {', '.join(known)}"


def _steps(place: str) -> list[str]:
    return [each for each in re.split(r"[.\[\]]+", place) if each]


def _at(content: Any, place: str) -> Any:
    for step in _steps(place):
        content = content[int(step) if isinstance(content, list | tuple) else step] if step != "..." else content
    return content


def _info_at(kind: Any, place: str) -> Any:
    info: Any = msgspec.inspect.type_info(kind)
    for step in _steps(place):
        if step.isdigit() or step == "...":
            info = info.item_type
        else:
            info = next(each.type for each in info.fields if each.encode_name == step)
        info = next((each for each in getattr(info, "types", ()) if hasattr(each, "fields")), info)  # X | None
    return info
