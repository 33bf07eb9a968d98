"""Sets up the loggers, one a room, from logging.toml; shows progress bars on a terminal, and errors in few lines.

What a user has set stays: the handlers of a program that configures logging itself come first.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from weakref import WeakKeyDictionary

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from autovaruna.config.files import PACKAGED, conf_dir, read_toml
from autovaruna.errors import AutoVarunaError, ConfigError

ROOMS = (
    *("config", "ranks", "graph", "profiler", "schedule", "planner", "stage", "evidence", "runtime", "checkpoint"),
    *("elastic", "session", "varuna"),
)
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
VERBOSITIES = {"none": logging.WARNING, "short": logging.INFO, "full": logging.DEBUG}
"""The lowest level that each `verbosity` shows of rank 0."""
_LONG_SECONDS = 2.0
_FIRST_LINE_SECONDS, _LINE_SECONDS = 10.0, 30.0
TRYING = "trying the trace and the optimizer out"
"""The phase of a call in which ranks find out whether these do what they should."""
ALL_FRAMES_VARIABLE = "AUTOVARUNA_FULL_TRACEBACKS"


class RankHandler(logging.Handler):
    """Writes records to standard error, with the rank in each."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = 0
        self.levels: dict[str, int] = {}  # as set here for each room, to tell them from those that the program set

    def emit(self, record: logging.LogRecord) -> None:
        record.rank = self.rank
        if self.rank != 0 and getattr(record, "is_alike", False):
            return
        if not logging.getLogger().handlers:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


def configure(rank: int = 0, environ: Mapping[str, str] | None = None, verbosity: str = "short") -> None:
    """Sets format and levels of all rooms, in place of an earlier call; ConfigError if logging.toml has a wrong key.

    A `verbosity` of full lowers the levels of the rooms that are at info, one of none raises them.
    """
    directory = conf_dir(os.environ if environ is None else environ)
    files = [PACKAGED / "logging.toml", directory / "logging.toml"]
    tables = [_checked(read_toml(path), str(path)) for path in files]
    levels = {room: level for table in tables for room, level in table["levels"].items()}
    merged = {key: value for table in tables for key, value in table["global"].items()}
    floor = 0 if rank == 0 else LEVELS[merged["other_ranks"]]
    root = logging.getLogger("autovaruna")
    handler = next((each for each in root.handlers if isinstance(each, RankHandler)), None) or RankHandler()
    root.addHandler(handler)  # which does nothing if it is there
    handler.rank = rank
    handler.setFormatter(logging.Formatter(merged["format"], merged["date_format"]))
    for room in ROOMS:
        logger = logging.getLogger(f"autovaruna.{room}")
        if logger.level == handler.levels.get(room, logging.NOTSET):
            level = LEVELS[levels[room]]
            handler.levels[room] = max(floor, VERBOSITIES[verbosity] if level == logging.INFO else level)
            logger.setLevel(handler.levels[room])


def _checked(content: dict[str, object], file: str) -> dict[str, dict[str, str]]:
    """Returns the levels and the other keys of a logging.toml, each known and of the right type."""
    levels = content.pop("levels", {})
    if not isinstance(levels, dict):
        raise ConfigError(f"{file}: levels is {levels!r}; expected a table, room = level")
    for key, value in content.items():
        _expect_known(file, "key", key, ("format", "date_format", "other_ranks", "levels"))
        if not isinstance(value, str):
            raise ConfigError(f"{file}: {key} is {value!r}; expected a text in quotes")
    for room in levels:
        _expect_known(file, "room", room, ROOMS)
    for level in [*levels.values(), content.get("other_ranks", "info")]:
        _expect_known(file, "level", level, tuple(LEVELS))
    texts = {key: str(value) for key, value in content.items()}
    try:
        logging.Formatter(texts.get("format") or None).format(logging.makeLogRecord({"rank": 0}))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: format cannot be used: {error!r}; expected %(name)s-like fields") from error
    return {"levels": levels, "global": texts}


def _expect_known(file: str, kind: str, got: object, known: tuple[str, ...]) -> None:
    if got not in known:
        nearest = difflib.get_close_matches(str(got), known, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"{file}: unknown {kind} {got!r}{hint} (known: {', '.join(known)})")


_of_call = threading.local()
"""Has, in a call that may take long, the `deadline` from which its phases are shown, and the set of those `shown`."""


@contextmanager
def long_call() -> Iterator[None]:
    """Has the phases inside shown from when they have taken two seconds together, each once."""
    if hasattr(_of_call, "deadline"):
        yield
        return
    _of_call.deadline, _of_call.shown = time.monotonic() + _LONG_SECONDS, set()
    try:
        yield
    finally:
        del _of_call.deadline, _of_call.shown


@contextmanager
def phase(logger: logging.Logger, what: str) -> Iterator[None]:
    """Shows in a line what is being done, once that, or the call that it belongs to, has taken two seconds."""
    shown: set[str] = getattr(_of_call, "shown", set())
    left = getattr(_of_call, "deadline", time.monotonic() + _LONG_SECONDS) - time.monotonic()

    def show() -> None:
        if what not in shown:
            shown.add(what)
            logger.info("%s ...", what)

    timer = Timer(left, show)
    timer.daemon = True
    if left > 0:
        timer.start()
    else:
        show()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def progress_lines(what: str) -> Iterator[Callable[[str], None]]:
    """Writes to standard error what is being done: after ten seconds, then each half minute, as a file can have it.

    Yields what to call with words that say more.
    """
    words, has_ended, begin = [what], threading.Event(), time.monotonic()

    def write() -> None:
        pause = _FIRST_LINE_SECONDS
        while not has_ended.wait(pause):
            pause = _LINE_SECONDS
            write_error(f"{words[-1]}, {time.monotonic() - begin:.0f} s\n")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield lambda more: words.__setitem__(-1, more)
    finally:
        has_ended.set()
        writer.join()


@contextmanager
def progress_bar(description: str, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar on standard error while the context lasts, if `is_shown`; now and then a line if that is no terminal.

    Yields what to call with the number of things done and their total: the `on_progress` of `measure`.
    """
    if not is_shown:
        yield lambda done, total: None
        return
    if not sys.stderr.isatty():
        with progress_lines(description) as say:
            yield lambda done, total: say(f"{description}: {done} of {total}")
        return
    with _bar(MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def status_bar() -> Iterator[Callable[[str, float], None]]:
    """Shows on standard error what is being done and how far it is; now and then in a line if that is no terminal.

    Yields what to call with that and the share of it that is done: the `progress` of the planner.
    """
    if not sys.stderr.isatty():
        with progress_lines("planning") as say:
            yield lambda what, share: say(f"{what}: {share:.0%}")
        return
    with _bar() as progress:
        task = progress.add_task("planning", total=1.0)
        yield lambda what, share: progress.update(task, description=what, completed=share)


def _bar(*more: ProgressColumn) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), *more)
    return Progress(*columns, console=Console(stderr=True), transient=True)


_all_frames: bool | None = None


def show_all_frames(is_asked: bool) -> None:
    """Says whether tracebacks have the frames of this package and of torch, too; before, the variable does."""
    global _all_frames
    _all_frames = is_asked


explanations: dict[str, str] = {}
"""What stands behind errors of others that nobody has caught, by a word of their messages."""


def error_text(error: BaseException) -> str:
    """Returns the traceback of an error, with the frames of the user's own files; the message is last.

    An error of this package says all in its message: what led to it inside of the package is left out.
    """
    named = os.environ.get(ALL_FRAMES_VARIABLE, "").lower() not in ("", "0", "no", "false")
    if named if _all_frames is None else _all_frames:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    found = traceback.TracebackException(type(error), error, error.__traceback__)
    if isinstance(error, AutoVarunaError):
        found.__cause__ = found.__context__ = None
    hidden, link = _hidden_files(), found
    if found.stack and found.stack[0].filename.startswith(hidden):  # caught in here: the script's lines lead here
        found.stack[:0] = traceback.extract_stack()
    num_hidden = 0
    while link is not None:
        users = [frame for frame in link.stack if not frame.filename.startswith(hidden)]
        num_hidden += len(link.stack) - len(users)
        link.stack[:] = users
        link = link.__cause__ or link.__context__  # type: ignore[assignment]
    lines = list(found.format())
    if num_hidden:
        lines.insert(-1, f"  ({num_hidden} frames of torch and AutoVaruna: {ALL_FRAMES_VARIABLE}=1 shows them)\n")
    words = set() if isinstance(error, AutoVarunaError) else {*re.findall(r"\w+", str(error))}
    lines += [f"{text}\n" for word, text in explanations.items() if word in words]
    return "".join(lines)


def _hidden_files() -> tuple[str, ...]:
    """Returns how the names of files begin whose frames say nothing to a user."""
    torch = sys.modules.get("torch")
    of_torch = () if torch is None or torch.__file__ is None else (str(Path(torch.__file__).parent),)
    made = () if sys.argv[:1] == ["-c"] else ("<string>",)  # by torch; a script on the command line is called so, too
    return (str(Path(__file__).parent) + os.sep, "<frozen", "<eval_with_key>", *made, *of_torch)


def write_error(text: str) -> None:
    """Writes to where errors go in the end; torch.distributed puts something else there while it handles an error."""
    stream = sys.__stderr__ or sys.stderr
    if stream is not None:
        stream.write(text)
        stream.flush()


_warned: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()


def warn_once(logger: logging.Logger, model: object, text: str) -> None:
    """Logs a warning about a model that all ranks find, and rank 0 shows, unless it has been logged before."""
    known = _warned.setdefault(model, set())
    if text not in known:
        known.add(text)
        logger.warning("%s", text, extra={"is_alike": True})


def readable(num_bytes: float) -> str:
    """Returns bytes as a person writes them: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.{3 + (num_bytes >= 999.5)}g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
