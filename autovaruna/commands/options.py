"""Offers settings as options of a command, under their own names: ``--num-stages 4``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from autovaruna.config.kinds import REFUSALS
from autovaruna.config.resolve import resolve
from autovaruna.config.settings import Settings, known_names
from autovaruna.errors import ConfigError


def add_settings(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Adds an option for each of some settings."""
    group = parser.add_argument_group("settings", "as in conf.toml; a list is separated by commas")
    known = known_names()
    for name in names:
        declaration, _ = known[name]
        default = str(declaration.default).replace("%", "%%")
        group.add_argument(_option(name), dest=f"setting_{name}", metavar="VALUE", help=f"{_help(name)} ({default})")


def settings_of(options: argparse.Namespace, extra: dict[str, object] | None = None) -> Settings:
    """Returns the settings: conf.toml, then variables, then options.

    Args:
        options: What was given.
        extra: More settings by name, as keywords.

    Raises:
        ConfigError: a value is of the wrong kind, or two contradict each other.
    """
    keywords = dict(extra or {})
    for dest, text in vars(options).items():
        if dest.startswith("setting_") and text is not None:
            name = dest.removeprefix("setting_")
            keywords[name] = _read(name, text)
    return resolve(keywords)


def _read(name: str, text: str) -> object:
    kind = known_names()[name][1].kind
    try:
        value = kind.parse(text)
        kind.read(value)
    except REFUSALS:
        raise ConfigError(f"{_option(name)} is {text!r}; expected {kind.expected}") from None
    return value


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(name: str) -> str:
    meaning: str = known_names()[name][0].metadata["meaning"]
    return meaning.replace("%", "%%").removesuffix(".")
