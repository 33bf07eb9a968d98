"""Runs the code of a graph with each operation called directly, and not through the layer of Python around it.

`torch.ops.aten.linear.default` is found by four names at every call, and its ``__call__`` is a function of Python that
hands its arguments on. Where an operation takes microseconds, that is as much again.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from itertools import count
from types import MethodType
from typing import Any

import torch
from torch import fx

from autovaruna._torch import OpOverload
from autovaruna.graph.origin import GENERATED

_OPERATION = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")
_numbers = count()


def direct(module: fx.GraphModule) -> Callable[..., Any]:
    """Returns what runs a graph as its ``forward`` does, line by line the same: errors name the same nodes."""
    code = module.graph.python_code("self")
    called: dict[str, Any] = {}

    def bare(match: re.Match[str]) -> str:
        name = match[0].replace(".", "_")
        operation = getattr(getattr(getattr(torch.ops, match[1]), match[2]), match[3])
        if type(operation) is not OpOverload:
            return match[0]
        called[name] = operation._op
        return name

    source = _OPERATION.sub(bare, code.src)
    file = f"{GENERATED}.direct_{next(_numbers)}"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names = {**code.globals, **called}
    exec(compile(source, file, "exec"), names)
    return MethodType(names["forward"], module)
