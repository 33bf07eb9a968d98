"""Shows a model that was split over the ranks as a module: modes, state and this rank's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autovaruna._torch import parse_to
from autovaruna.api import AutoVaruna
from autovaruna.errors import InputError

if TYPE_CHECKING:
    from typing_extensions import Self


class SplitModule(nn.Module):
    """A module whose names and numbers are those of another.

    Attributes:
        model: the wrapped model; not registered, so that names stay the model's own.
        device: where it is.
    """

    model: AutoVaruna
    device: torch.device

    def train(self, mode: bool = True) -> Self:
        """Sets training mode on the model."""
        self.training = mode
        if "model" in self.__dict__:
            self.model.train(mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Stays where the model is: wrapping has put it there.

        Raises:
            InputError: another device or a dtype is asked for.
        """
        device, dtype, *_ = parse_to(*args, **kwargs)
        if dtype is not None or (device is not None and torch.empty(0, device=device).device != self.device):
            raise InputError(
                f"The model is split and on {self.device}: got to({device or dtype}). Pass device= to Varuna."
            )
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the whole model's state under its own names, on every rank. Collective."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a whole model's state, of which this rank takes its part."""
        return self.model.load_state_dict(state_dict, strict, assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that this rank holds, under the model's own names.

        Where there are none, as in a stage that is only a loss, it yields one without elements: torch makes no
        optimizer of nothing.
        """
        every = self.model.named_parameters(prefix, recurse, remove_duplicate)
        own = [(name, parameter) for name, parameter in every if not parameter.is_meta]
        yield from own or [("no_parameters", self._placeholder)]

    @cached_property
    def _placeholder(self) -> nn.Parameter:
        return nn.Parameter(torch.empty(0))

    def _drop_placeholder(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes what stands for no parameters out of an optimizer."""
        for group in optimizer.param_groups:
            group["params"][:] = [each for each in group["params"] if each is not self._placeholder]

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers of the model, under its own names."""
        yield from self.model.named_buffers(prefix, recurse, remove_duplicate)
