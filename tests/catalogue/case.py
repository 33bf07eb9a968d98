"""Defines `Case`: one model of the catalogue, how to build it, what to feed it and how to get its loss."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Batch: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one call: ``model(*batch[0], **batch[1])``."""

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
"""Where models of the catalogue and their batches are: ``TEST_DEVICE=cuda make test`` has them on a GPU."""
if DEVICE.type == "cuda":  # the same bits and full precision, as on the CPU
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False


@dataclass(frozen=True)
class Case:
    """A model to test with."""

    name: str  # unique in the catalogue; an identifier
    build: Callable[[], nn.Module]  # draws from torch's generator, so call `model` for a given seed
    make_batch: Callable[[int, int], Batch]  # from ``(size, seed)``; equal arguments give equal batches
    loss: Callable[[Any, Batch], Tensor] | None = None  # the mean over the samples; None: the model returns its loss
    has_dropout: bool = False  # whether forward draws random numbers in train mode
    has_batch_norm: bool = False  # whether samples of a micro-batch depend on each other, or a buffer is updated
    is_always_random: bool = False  # whether it draws random numbers with every dropout probability zero too
    max_stages: int = 4  # a number of stages that the graph allows at least (a hint for tests)
    needs: str = ""  # a package beside torch that must be there

    def model(self, seed: int = 0) -> nn.Module:
        """Returns a new model whose weights depend on `seed` alone; the caller's generator is untouched."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().train().to(DEVICE)

    def batch(self, size: int, seed: int) -> Batch:
        """Returns the arguments of one call, on the device of the models."""
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), self.make_batch(size, seed))

    def loss_of(self, output: Any, batch: Batch) -> Tensor:
        loss = self.loss(output, batch) if self.loss else loss_in(output)
        assert isinstance(loss, Tensor) and loss.dim() == 0, f"{self.name}: no scalar loss in {type(output).__name__}"
        return loss

    def without_dropout(self) -> Case:
        """Returns the same case with every dropout probability zero, to compare with plain PyTorch."""
        if not self.has_dropout:
            return self
        return replace(self, build=lambda: zero_dropout(self.build()), has_dropout=self.is_always_random)

    def __str__(self) -> str:
        return self.name


def loss_in(output: Any) -> Any:
    """Returns the loss in what a model returned: the tensor itself, or what is named ``loss``."""
    if isinstance(output, Mapping):
        return output["loss"]
    return getattr(output, "loss", output)


def zero_dropout(model: nn.Module) -> nn.Module:
    """Sets every dropout probability of a model to zero, in place: modules' and configurations' alike."""
    for module in model.modules():
        if hasattr(module, "p"):
            setattr(module, "p", 0.0)  # noqa: B010 - a Module's attributes are typed as modules
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
    return model


def generator(seed: int) -> torch.Generator:
    """Returns a generator of its own, so that making a batch draws nothing from torch's."""
    return torch.Generator().manual_seed(seed)


def floats(*shape: int, of: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=of)


def integers(high: int, *shape: int, of: torch.Generator) -> Tensor:
    """Returns random integers from ``0`` to ``high - 1`` of a shape."""
    return torch.randint(high, shape, generator=of)


def batch_size(batch: Batch) -> int:
    """Returns the number of samples of a batch: the first dimension of its first tensor."""
    return next(leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0)
