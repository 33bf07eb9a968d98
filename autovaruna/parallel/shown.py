"""Defines `ShownModule`: a wrapper that shows the modules, parameters and attributes of what it wraps as its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

Shown = TypeVar("Shown", bound="ShownModule")


class ShownModule(nn.Module):
    """Shows a wrapped module under its own names.

    Args:
        module: What is wrapped.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module  # not registered: names must stay the module's own
        self.training = module.training

    def train(self: Shown, mode: bool = True) -> Shown:
        """Sets training mode on the model."""
        self.training = mode
        self.module.train(mode)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of the model, under its own names."""
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers of the model, under its own names."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules of the model, under its own names."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the direct children of the model."""
        yield from self.module.named_children()

    def extra_repr(self) -> str:
        """Returns the wrapped model's print."""
        return repr(self.module)

    def __getattr__(self, name: str) -> Any:
        """Finds what the wrapper does not define on the wrapped model (``model.config``)."""
        if "module" not in self.__dict__ or name == "module":
            raise AttributeError(name)
        return getattr(self.__dict__["module"], name)
