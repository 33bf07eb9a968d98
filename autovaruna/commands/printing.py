"""Prints tables and texts to standard output."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table


def show(content: Table | str) -> None:
    """Prints a table in the width of the terminal, or a text as it is; 160 columns where there is no terminal."""
    if isinstance(content, str):
        sys.stdout.write(content + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(content)
