"""Reads what a trace depends on besides inputs: training flags, grad mode, autocast, which parameters are frozen."""

from __future__ import annotations

import torch
from torch import nn

from autovaruna.graph.precision import Precision, current_precision
from autovaruna.graph.watching.attributes import Attributes
from autovaruna.graph.watching.shared_values import SharedValues

Mode = tuple[str, str, list[bool], list[bool], bool, Precision]
"""Attributes and globals that were changed, what trains and what is trained, grad mode, and autocasts."""


class ModeReader:
    """Reads the mode of one model, at every call.

    Walking a deep model takes PyTorch milliseconds, so the modules are those that its attributes know; parameters and
    flags are read anew, wherever they were replaced.

    Args:
        model: The model.

    Attributes:
        attributes: what the script has changed of it since the start.
    """

    def __init__(self, model: nn.Module) -> None:
        self.attributes = Attributes(model)
        self._shared = SharedValues(model)
        self._latest: Mode | None = None
        self._latest_words = ""

    def words(self) -> str:
        """Returns the mode as a text that is equal for calls that one trace serves."""
        changed = self.attributes.words()  # first: it walks the modules again if there are others
        training = self.attributes.training()
        parameters = [each for each in self.attributes.parameters() if each is not None]
        with torch._C.DisableTorchFunctionSubclass():  # those that other ranks hold answer through Python otherwise
            trained = [each.requires_grad for each in parameters]
        mode = changed, self._shared.words(), training, trained, torch.is_grad_enabled(), current_precision()
        if mode != self._latest:
            self._latest, self._latest_words = mode, _words(*mode)
        return self._latest_words

    def watch(self, reads: frozenset[str]) -> None:
        """Takes what a trace has read, now: the names of attributes, and all globals that forward names."""
        self.attributes.watch(reads)
        self._shared.watch()

    def settle(self) -> None:
        """Takes everything as it is now: a call of the library's own has ended."""
        self.attributes.settle()
        self._shared.settle()


def _words(
    changed: str, shared: str, training: list[bool], trained: list[bool], is_grad: bool, precision: Precision
) -> str:
    flags = "".join(["t" if each else "e" for each in training])
    frozen = "".join(["g" if each else "f" for each in trained])
    autocast = ",".join(map(str, precision)) or "off"
    mode = f"training={flags} gradient={is_grad} autocast={autocast} parameters={frozen}"
    return f"{mode}{changed and f' attributes={changed}'}{shared and f' globals={shared}'}"


def mode_of(model: nn.Module) -> str:
    """Returns the mode of a model now, as `ModeReader`."""
    return ModeReader(model).words()
