"""Offers settings as options of commands (``--num-stages 4``), and prints each with where its value came from."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from autovaruna.commands.printing import add_json, show, show_json
from autovaruna.config.files import PACKAGED
from autovaruna.config.settings import REFUSALS, Settings, declarations, meanings, named_settings, resolve
from autovaruna.errors import ConfigError

EXAMPLE = "AUTOVARUNA_NUM_STAGES=2 autovaruna config"


def add_settings(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Adds an option for each of some settings."""
    group = parser.add_argument_group("settings", "as in conf.toml; a list is separated by commas")
    known, words = named_settings(), meanings()
    for name in names:
        text = f"{words[name].removesuffix('.')} ({known[name][0].default})".replace("%", "%%")
        group.add_argument(_option(name), dest=f"setting_{name}", metavar="VALUE", help=text)


def settings_of(options: argparse.Namespace, extra: dict[str, object] | None = None) -> Settings:
    """Returns the settings: conf.toml, then variables, then options."""
    keywords = dict(extra or {})
    for dest, text in vars(options).items():
        if dest.startswith("setting_") and text is not None:
            name = dest.removeprefix("setting_")
            keywords[name] = _read(name, text)
    return resolve(keywords)


def _read(name: str, text: str) -> object:
    kind = named_settings()[name][1]
    try:
        value = kind.parse(text)
        kind.read(value)
    except REFUSALS:
        raise ConfigError(f"{_option(name)} is {text!r}; expected {kind.expected}") from None
    return value


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the option."""
    add_json(parser)


def run(options: argparse.Namespace) -> None:
    """Prints each setting, its value, where the value came from, and what the setting means."""
    settings, words = resolve(), meanings()
    if options.json:
        values = settings.as_dict()
        show_json({n: {"value": values[n], "from": settings.source_of(n), "meaning": words[n]} for n in values})
        return
    table = Table("setting", "value", "from", "meaning", caption=f"A conf.toml to start from: {PACKAGED / 'conf.toml'}")
    for each in declarations():
        value = getattr(settings, each.name)
        cells = (each.name, "auto" if value is None else str(value), settings.source_of(each.name))
        table.add_row(*(Text(cell) for cell in (*cells, words[each.name])))
    show(table)
