"""Counts what the script does with a model and its optimizer between calls, which every rank must do alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any
from zlib import crc32

from torch import Tensor
from torch.optim import Optimizer

from autovaruna.graph.guards import is_plain
from autovaruna.interception.optimizer_proxy import OptimizerProxy
from autovaruna.profiler.optimizer_trial import asks_for_closure

_STEP, _ZERO = "steps of the optimizer", "calls of its zero_grad()"

Digest = tuple[Hashable, ...]


class ScriptActions:
    """What a script has done with a model and its optimizer, none of which the ranks do together.

    Ranks that do other things would train copies of the weights that differ, without another sign of it.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter({_STEP: 0, _ZERO: 0})
        self._optimizer: Optimizer | None = None
        self._groups: list[str] = []
        self._raw: list[Any] | None = None  # options none of which can change by itself; None: some can
        self._digest = 0
        self._loss = "none"

    def record(self, act: str) -> None:
        """Counts an act."""
        self._counts[act] += 1

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer is watched."""
        return self._optimizer is not None

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer so far."""
        return self._counts[_STEP]

    def watch(self, proxy: OptimizerProxy, optimizer: Optimizer, groups: Sequence[Sequence[str]]) -> None:
        """Counts what is done with an optimizer from now on; `groups` are names of the whole optimizer's parameters."""
        self._optimizer = optimizer
        self._groups = [f"{len(names)} from {names[0]} to {names[-1]}" if names else "none" for names in groups]
        proxy.after.append(partial(self.record, _STEP))
        proxy.on_clear = partial(self.record, _ZERO)
        if asks_for_closure(optimizer):
            proxy.on_loss = self._record_loss

    def _record_loss(self, loss: Any) -> None:
        """Records the loss that a closure has returned: steps go by it."""
        self._loss = repr(loss.item() if isinstance(loss, Tensor) else loss)

    def digest(self) -> Digest:
        """Returns what is short, and equal for ranks that have done the same."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        raw = [value for group in groups for name, value in group.items() if name != "params"]
        if self._raw is None or len(raw) != len(self._raw) or not all(map(is_, raw, self._raw)):
            self._raw = raw if all(map(is_plain, raw)) else None
            self._digest = crc32(repr(list(self._options())).encode())
        return *sorted(self._counts.items()), type(self._optimizer).__name__, self._digest, self._loss

    def words(self) -> dict[str, str]:
        """Returns all of it in words."""
        words = {"the optimizer": "none" if self._optimizer is None else type(self._optimizer).__name__}
        words |= {f"the number of {act}": str(count) for act, count in self._counts.items()}
        words[f"the loss by which {words['the optimizer']} goes, which is to be what forward returns,"] = self._loss
        return words | {
            f"{name} of the optimizer's group {place}": repr(value) for place, name, value in self._options()
        }

    def _options(self) -> Iterator[tuple[int, str, Any]]:
        """Yields group, name and value of each option that the optimizer's class declares, and the parameters."""
        if self._optimizer is not None:
            yield from ((place, "parameters", names) for place, names in enumerate(self._groups))
            for place, group in enumerate(self._optimizer.param_groups):
                for name in self._optimizer.defaults:
                    yield place, name, _plain(group.get(name))


def _plain(value: object) -> object:
    """Returns an option as a number or a text; what is neither says nothing, for it may differ between processes."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value if is_plain(value) else None
