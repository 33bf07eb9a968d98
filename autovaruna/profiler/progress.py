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
