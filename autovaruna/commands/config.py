"""Prints each setting, its value, and where the value came from."""

from __future__ import annotations

import argparse

from rich.table import Table
from rich.text import Text

from autovaruna.commands.printing import show
from autovaruna.config.files import PACKAGED
from autovaruna.config.resolve import resolve
from autovaruna.config.settings import declarations

HELP = "print each setting, its value, and where the value came from"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds nothing."""


def run(options: argparse.Namespace) -> None:
    """Prints the table."""
    settings = resolve()
    table = Table("setting", "value", "from", "meaning", caption=f"A conf.toml to start from: {PACKAGED / 'conf.toml'}")
    for each in declarations():
        value = getattr(settings, each.name)
        cells = (each.name, "auto" if value is None else str(value), settings.source_of(each.name))
        table.add_row(*(Text(cell) for cell in (*cells, each.metadata["meaning"])))
    show(table)
