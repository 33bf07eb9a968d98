"""Warns of a number that a script changes from call to call: each one asks for a new trace, and a tensor would not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from autovaruna.graph.call import CallSpec
from autovaruna.log import warn_once

logger = logging.getLogger(__name__)
_MOST = 2  # traces for one number alone, after the first one
_ARGUMENT = "argument "


class VaryingNumbers:
    """What calls that were traced had beside tensors, on one rank."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._latest: dict[tuple[Any, ...], dict[str, str]] = {}  # by what calls are beside their values
        self._seconds: dict[str, list[float]] = {}

    def record(self, call: CallSpec, attributes: Mapping[str, str], seconds: float) -> None:
        """Records that a call took so long, for it was traced; warns if again nothing but a number was another one."""
        arguments = call.plain_arguments(self._model)
        inputs = tuple(each.words() for each in call.inputs)
        like = (call.method, str(call.tree.spec), inputs, call.mode.partition(" attributes=")[0])
        now = {**attributes, **{f"{_ARGUMENT}{name}": value for name, value in arguments.items()}}
        before = self._latest.get(like)
        self._latest[like] = now
        names = [] if before is None else [name for name in {**now, **before} if now.get(name) != before.get(name)]
        if len(names) == 1 and _is_number(now.get(names[0], "")):
            spent = self._seconds.setdefault(names[0], [])
            spent.append(seconds)
            if len(spent) == _MOST:
                self._warn(names[0], sum(spent))

    def _warn(self, name: str, seconds: float) -> None:
        what, own = name.removeprefix(_ARGUMENT), name.rpartition(".")[2]
        kept = f"self.register_buffer({own!r}, torch.tensor(value), persistent=False) in __init__"
        advice = f"Keep it as a tensor, {kept}, and set it by {what}.fill_(value)"
        text = (
            f"{name} is another number in each call, and each one asks for a new trace: {seconds:.1f} s so far. "
            f"{advice if what == name else f'Pass it as a tensor, {what}=torch.tensor(value)'}: one trace serves all. "
            "Where forward needs the number itself (an if, a shape, float(), item()), let it have few different values"
        )
        warn_once(logger, self._model, text)


def _is_number(words: str) -> bool:
    try:
        float(words)
    except ValueError:
        return False
    return True
