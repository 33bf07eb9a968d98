"""Collects the texts of the errors that the package raises, with … for what differs from case to case.

What a class of `errors.py`, or of one derived from it, is made with counts, wherever that stands: raised, returned or
handed on. A text that a function of the same file makes is looked up there.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "autovaruna"
MARKER = re.compile(r"<!-- errors: (\w+) (\S+) -->")
_ANY = "…"
_LEAST_LETTERS = 8  # a text of fewer letters says nothing: it hands another one on


class ErrorText(NamedTuple):
    """A text, the public class of its error, and the file that makes it, as ``session/agreement``."""

    kind: str
    file: str
    text: str


def collect(package: Path = PACKAGE) -> list[ErrorText]:
    """Returns all texts of a package, each once, in the order of files and lines."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(package.rglob("*.py"))}
    kinds = _kinds(trees)
    found: dict[ErrorText, None] = {}
    for file, tree in trees.items():
        name = file.relative_to(package).with_suffix("").as_posix()
        for kind, text in _texts_of(tree, kinds):
            found[ErrorText(kind, name, text)] = None
    return list(found)


def fill(page: str) -> str:
    """Puts texts in the place of the page's markers: each goes to the longest marker of its class that its file fits.

    Raises:
        LookupError: no marker is for a text: its cause and cure have to be written.
    """
    places: dict[tuple[str, str], list[str]] = {(each[1], each[2]): [] for each in MARKER.finditer(page)}
    for kind, file, text in collect():
        fitting = [place for place in places if place[0] == kind and (file + "/").startswith(place[1] + "/")]
        if not fitting:
            raise LookupError(f"docs/reference/errors.md has no cause and cure of a {kind} of {file}: {text}")
        places[max(fitting, key=lambda place: len(place[1]))].append(text)
    return MARKER.sub(lambda match: "\n".join(f"- ``{text}``" for text in places[match[1], match[2]]), page)


def _kinds(trees: dict[Path, ast.Module]) -> dict[str, str]:
    """Returns, for each class of error, the class of `errors.py` that it is or derives from."""
    bases: dict[str, list[str]] = {}
    public: set[str] = set()
    for file, tree in trees.items():
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        bases |= {each.name: [base.id for base in each.bases if isinstance(base, ast.Name)] for each in classes}
        public |= {each.name for each in classes} if file.parent == PACKAGE and file.stem == "errors" else set()

    def kind(name: str) -> str:
        return name if name in public else next(filter(None, map(kind, bases.get(name, ()))), "")

    return {name: kind(name) for name in bases if kind(name)}


def _texts_of(tree: ast.Module, kinds: dict[str, str]) -> Iterator[tuple[str, str]]:
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    constants = _assigned(tree.body)
    inside: dict[ast.AST, ast.FunctionDef] = {node: each for each in functions.values() for node in ast.walk(each)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        kind = kinds.get(ast.unparse(node.func).rpartition(".")[2])
        if kind:
            local = _assigned(ast.walk(inside[node])) if node in inside else {}
            for text in _templates(node.args[0], functions, constants, local):
                plain = re.sub(rf"\s+|({_ANY}\s*)+(?={_ANY})", " ", text).strip()
                if len(re.sub(r"\W", "", plain)) >= _LEAST_LETTERS:
                    yield kind, plain


def _assigned(nodes: Iterator[ast.AST] | list[ast.stmt]) -> dict[str, list[ast.expr]]:
    """Returns what names are given, each time."""
    given: dict[str, list[ast.expr]] = defaultdict(list)
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            given[ast.unparse(target)].append(node.value)
    return given


def _templates(node: ast.expr, functions: dict[str, ast.FunctionDef], *names: dict[str, list[ast.expr]]) -> list[str]:
    """Returns the texts that an expression may give."""

    def of(part: ast.expr) -> list[str]:
        return _templates(part, functions, *names)

    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(_part(part, names[0]) for part in parts)]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return [first + second for first in of(left) or [_ANY] for second in of(right) or [_ANY]]
        case ast.IfExp(body=body, orelse=orelse):
            return of(body) + of(orelse)
        case ast.Name(id=name):
            values = [each for given in names for each in given.get(name, ())]
            return [text for each in values for text in _templates(each, functions, *names[:1])]
        case ast.Call(func=ast.Name(id=name)) if name in functions:
            returns = [each for each in ast.walk(functions[name]) if isinstance(each, ast.Return) and each.value]
            constants, local = names[0], _assigned(ast.walk(functions[name]))
            return [text for each in returns for text in _templates(each.value, {}, constants, local)]
    return []


def _part(part: ast.expr, constants: dict[str, list[ast.expr]]) -> str:
    """Returns a part of an f-string: its text, that of a constant of the file, or a sign for anything."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    value = part.value if isinstance(part, ast.FormattedValue) else None
    given = constants.get(value.id, []) if isinstance(value, ast.Name) else []
    return given[0].value if len(given) == 1 and _is_text(given[0]) else _ANY  # type: ignore[attr-defined]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
