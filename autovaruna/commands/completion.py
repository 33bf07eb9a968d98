"""Prints a script that completes commands and options in a shell (the extra ``completion``: shtab)."""

from __future__ import annotations

import argparse

from autovaruna.commands.printing import show
from autovaruna.errors import ConfigError

EXAMPLE = "autovaruna completion bash >~/.local/share/bash-completion/completions/autovaruna"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace) -> None:
    """Prints a script that completes commands, options and files: _autovaruna for zsh, autovaruna.fish for fish."""
    try:
        import shtab
    except ImportError:
        raise ConfigError(
            "completion needs shtab, which is not installed: pip install 'autovaruna[completion]'"
        ) from None
    show(str(shtab.complete(options.parser_of(None), options.shell)))
