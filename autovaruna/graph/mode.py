"""Reads what a trace depends on besides inputs: training flags, grad mode, autocast, which parameters are frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autovaruna.graph.attributes import Attributes
from autovaruna.graph.precision import current_precision


class ModeReader:
    """Reads the mode of one model, at every call.

    Walking a deep model takes PyTorch milliseconds. So the modules are kept, and walked again where a module has
    another child than before; parameters and flags are read anew, wherever they were replaced.

    Args:
        model: The model.

    Attributes:
        attributes: what the script has changed of it since the start.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._learn()
        self.attributes = Attributes(model)

    def words(self) -> str:
        """Returns the mode as a text that is equal for calls that one trace serves."""
        if _values(self._holders) != self._children:
            self._learn()
        flags = "".join(["t" if module.training else "e" for module in self._modules])
        autocast = ",".join(map(str, current_precision())) or "off"
        frozen = "".join(["g" if p.requires_grad else "f" for p in _values(self._parameters) if p is not None])
        changed = self.attributes.words()
        mode = f"training={flags} gradient={torch.is_grad_enabled()} autocast={autocast} parameters={frozen}"
        return f"{mode} attributes={changed}" if changed else mode

    def _learn(self) -> None:
        self._modules = list(self._model.modules())
        self._holders = [module._modules for module in self._modules]
        self._parameters = [module._parameters for module in self._modules]
        self._children = _values(self._holders)


def mode_of(model: nn.Module) -> str:
    """Returns the mode of a model now, as `ModeReader`."""
    return ModeReader(model).words()


def _values(tables: list[dict[str, Any]]) -> list[Any]:
    return [value for table in tables for value in table.values()]
