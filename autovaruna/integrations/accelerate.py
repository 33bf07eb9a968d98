"""Defines `Accelerator`: accelerate's, which prepares a model and its optimizer as one AutoVaruna over all ranks.

The wrapper stands where DistributedDataParallel would. What accelerate does to it and not for it: `unwrap_model` gives
the model, `save_state` and `load_state` hold the whole model's state, on any number of ranks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial, wraps
from itertools import chain, islice
from typing import Any

import accelerate
import torch
from accelerate.utils.operations import recursively_apply
from torch import nn

from autovaruna.api import AutoVaruna
from autovaruna.config.settings import resolve
from autovaruna.errors import InputError
from autovaruna.integrations.process_group import init_process_group
from autovaruna.integrations.whole_state import show_whole_state
from autovaruna.interception.optimizer_proxy import parameters_of
from autovaruna.ranks.environment import get_world, get_world_size
from autovaruna.ranks.exchange import ALIKE


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator over all ranks of the launcher. See accelerate.Accelerator for the other arguments.

    Args:
        autovaruna: Settings of AutoVaruna for the models that it prepares.

    Raises:
        ConfigError: a setting is unknown or of the wrong kind.
    """

    def __init__(self, *args: Any, autovaruna: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._settings = dict(autovaruna or {})
        resolve(self._settings)
        self._at_hand: list[torch.optim.Optimizer] = []
        init_process_group()
        super().__init__(*args, **kwargs)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepares what is passed, as accelerate does; a model to train comes with its optimizer in one call.

        Raises:
            InputError: an optimizer came without its model, or a model's parameters belong to several optimizers.
        """
        self._at_hand = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        models = [each for each in args if isinstance(each, nn.Module)]
        for optimizer in self._at_hand:
            if not any(_trains(optimizer, model) for model in [*models, *self._models]):
                raise InputError(
                    f"accelerator.prepare: got {type(optimizer).__name__} without the model whose parameters it has. "
                    "Expected both in one call: model, optimizer = accelerator.prepare(model, optimizer)."
                )
        try:
            return super().prepare(*args, device_placement=device_placement)
        finally:
            self._at_hand = []

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Returns the wrapper of a model, with the optimizer that was passed to `prepare` beside it."""
        if isinstance(model, AutoVaruna):
            if model not in self._models:
                self._models.append(model)
            return model
        found = [each for each in self._at_hand if _trains(each, model)]
        if len(found) > 1:
            raise InputError(
                f"accelerator.prepare: {len(found)} optimizers have parameters of {type(model).__name__}; expected one."
            )
        if self.device_placement if device_placement is None else device_placement:
            model = model.to(self.device)
        wrapper = AutoVaruna(model, found[0] if found else None, scaler=self.scaler, **self._settings)
        show_whole_state(wrapper, "call accelerator.save_model(model, folder) or accelerator.get_state_dict(model)")
        wrapper.forward = self._forward(wrapper, wrapper.forward)
        self._models.append(wrapper)
        return wrapper

    def _forward(self, wrapper: AutoVaruna, forward: Any) -> Any:
        """Returns the forward of a wrapper like that of DistributedDataParallel, in the precision of accelerate."""

        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "attention_mask" in kwargs:  # which says of what is padded that it does not count
                pad_token = getattr(getattr(wrapper.module, "config", None), "pad_token_id", None) or 0
                kwargs |= padded_to_longest(_words_of(kwargs), partial(pad_value, pad_token=pad_token))
            with self.autocast():
                output = forward(*args, **kwargs)
            if wrapper.settings.reduction == "sum":  # backward is from the mean of ranks' losses, as scripts count on
                output = recursively_apply(self._mean_of_ranks, output)
            # Not convert_outputs_to_fp32: it asks for the dtype of a key-value cache, which stays on its stage.
            return recursively_apply(torch.Tensor.float, output, test_type=_is_half) if self.native_amp else output

        return call

    def _mean_of_ranks(self, output: torch.Tensor) -> torch.Tensor:
        return output / self.num_processes if output.requires_grad and output.ndim == 0 else output

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduces over the ranks, as accelerate does; InputError for a parameter, of which all ranks have one value."""
        own = [each.data_ptr() for model in self._models for each in model.parameters() if not each.is_meta]
        if isinstance(tensor, torch.Tensor) and (tensor.is_meta or tensor.data_ptr() in own):
            raise InputError(
                "accelerator.reduce: got the numbers of a parameter, as from LocalSGD, whose ranks train models of "
                "their own. Here all ranks train one model in each step: leave LocalSGD out, or accumulate gradients."
            )
        return super().reduce(tensor, *args, **kwargs)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Returns the model that is wrapped; each rank has the numbers of its own part."""
        return super().unwrap_model(model.module if isinstance(model, AutoVaruna) else model, *args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Returns the whole model's state on every rank, as `save_model` asks for it. Collective."""
        if not isinstance(model, AutoVaruna):
            return super().get_state_dict(model, unwrap)
        return OrderedDict(model.state_dict())  # accelerate leaves tied weights out of an OrderedDict alone


def _trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for parameter in parameters_of(optimizer))


def _words_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs that have a number for each word of each sample."""
    tensors = {name: each for name, each in inputs.items() if isinstance(each, torch.Tensor)}
    return {name: each for name, each in tensors.items() if each.ndim == 2 and not each.is_floating_point()}


def pad_value(name: str, pad_token: int, label_names: Collection[str] = ("labels",)) -> int:
    """Returns what stands where a sample has ended: what losses ignore in labels, the token of padding, zero."""
    return -100 if name in label_names else pad_token if name.endswith("input_ids") else 0


def padded_to_longest(inputs: dict[str, Any], value_of: Callable[[str], int], is_left: bool = False) -> dict[str, Any]:
    """Pads inputs to the longest of all ranks', behind their values or before them. Collective."""
    if get_world_size() == 1:
        return inputs
    sizes = {name: tuple(each.shape[1:]) for name, each in inputs.items() if isinstance(each, torch.Tensor)}
    names = [(name, len(own)) for name, own in sorted(sizes.items())]
    own = array("d", chain(*(sizes[name] for name, _ in names))).tobytes()
    agreed = get_world().exchange("lengths of samples", None, repr(names).encode(), block=own)
    if agreed.differs(ALIKE):
        return inputs  # the call says how they differ
    longest = iter(map(int, map(max, zip(*agreed.numbers(), strict=True))))
    padded = dict(inputs)
    for name, num_lengths in names:
        missing = [size - own for size, own in zip(islice(longest, num_lengths), sizes[name], strict=True)]
        widths = [width for each in reversed(missing) for width in ((each, 0) if is_left else (0, each))]
        if any(widths):
            padded[name] = torch.nn.functional.pad(padded[name], widths, value=value_of(name))
    return padded


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
