"""Fills the pages of the site with what the package itself says: settings, texts of errors, output of commands."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

import error_texts  # noqa: E402  (it lies beside this file, which mkdocs loads by its path)

from autovaruna.__main__ import main  # noqa: E402
from autovaruna.config.settings import declarations, meanings  # noqa: E402

os.environ["COLUMNS"] = "100"  # of what commands print
_OUTPUT = re.compile(r"<!-- output: (.+) -->")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills the markers of a page."""
    if page.file.src_uri == "reference/errors.md":
        markdown = error_texts.fill(markdown)
    for marker, fill in {"<!-- settings -->": settings, "<!-- commands -->": commands}.items():
        markdown = markdown.replace(marker, fill()) if marker in markdown else markdown
    return _OUTPUT.sub(lambda match: _output(match[1]), markdown)


def settings() -> str:
    """Returns a section for each setting: what it means, its kind, default and other names."""
    meaning, lines = meanings(), []
    for each in declarations():
        kind, aliases = each.metadata["kind"], each.metadata["aliases"]
        default = "not given" if each.default is None else f"`{each.default!r}`"
        lines += [f"## {each.name}", "", f"{meaning[each.name]}", "", f"- takes {_escaped(kind.expected)}"]
        lines += [f"- default: {default}", f"- variable: `AUTOVARUNA_{each.name.upper()}`"]
        lines += [f"- other names: {', '.join(f'`{name}`' for name in aliases)}"] * bool(aliases) + [""]
    return "\n".join(lines)


def commands() -> str:
    """Returns a section for each command, with its help."""
    names = re.findall(r"^    (\w+)(?:  |$)", _help("--help"), re.MULTILINE)
    assert names, "the help of autovaruna lists no commands"
    return "\n".join(f"## {name}\n\n```text\n{_help(name, '--help')}\n```\n" for name in names)


def _help(*arguments: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(arguments)
    return text.getvalue().rstrip()


def _escaped(text: str) -> str:
    return re.sub(r"([\[\]{}<>*_])", r"\\\1", text)


def _output(command: str) -> str:
    """Returns a command and what it prints, run in the root of the repository."""
    python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": python}
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}\n{done.stdout}{done.stderr}")
    return f"```text\n{done.stdout.rstrip()}\n```"
