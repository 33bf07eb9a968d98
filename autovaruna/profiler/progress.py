"""Shows a progress bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(description: str, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar on standard error while the context lasts.

    Args:
        description: What is being done.
        is_shown: False shows nothing; neither does a standard error that is not a terminal.

    Yields:
        What to call with the number of things done and their total: the `on_progress` of `measure`.
    """
    if not (is_shown and sys.stderr.isatty()):
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def status_bar() -> Iterator[Callable[[str, float], None]]:
    """Shows on standard error what is being done and how far it is; nothing where that is not a terminal.

    Yields:
        What to call with what is being done and the share of it that is done: the `progress` of the planner.
    """
    if not sys.stderr.isatty():
        yield lambda what, share: None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
