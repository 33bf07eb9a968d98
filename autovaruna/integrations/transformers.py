"""Defines `Trainer` and `TrainingArguments`: those of transformers, with the model trained over all ranks.

The wrapper stands where DistributedDataParallel would: ``self.model`` stays the model, ``self.model_wrapped`` is the
wrapper. What Trainer does on rank 0 alone, but for which all ranks are needed (the whole model's state and the
optimizer's), all ranks do here.
"""

from __future__ import annotations

import copy
import dis
import inspect
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
import transformers
from accelerate.utils import convert_outputs_to_fp32, recursively_apply, slice_tensors
from torch import nn
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_pt_utils import find_batch_size

from autovaruna._torch import OWN_CALL, replaced
from autovaruna.api import AutoVaruna
from autovaruna.config.settings import resolve
from autovaruna.errors import ConfigError
from autovaruna.integrations.accelerate import pad_value, padded_to_longest
from autovaruna.integrations.process_group import init_process_group
from autovaruna.integrations.whole_state import show_whole_calls, show_whole_state
from autovaruna.ranks.environment import get_world_size
from autovaruna.session.generation import has_encoder, owner_of_loop

if "get_tp_size" not in transformers.Trainer.compute_loss.__code__.co_names:
    raise ImportError(
        f"autovaruna.integrations.transformers: got transformers {transformers.__version__}, whose Trainer scales its "
        "loss in another way; expected 5.23 or newer. pip install -U transformers"
    )

ADAPTERS = "adapter_model.safetensors"
_Other: Any = Any if TYPE_CHECKING else object  # of which class of transformers, the one that is mixed in with says


def _settings(text: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the settings of AutoVaruna, from a dictionary or the JSON of a command line; ConfigError if none."""
    try:
        settings = json.loads(text) if isinstance(text, str) else dict(text or {})
        return dict(settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"TrainingArguments(autovaruna=...): got {text!r}, expected a dictionary of settings, or its JSON, as in "
            f"'{{\"num_micro_batches\": 4}}' ({error})"
        ) from error


@dataclass
class ArgumentsMixin(_Other):
    """Adds AutoVaruna's settings to training arguments, and joins the ranks before transformers asks for them."""

    autovaruna: dict | str | None = field(  # type: ignore[type-arg]
        default=None,
        metadata={"help": "Settings of AutoVaruna, a dictionary or JSON; `python -m autovaruna config` lists them."},
    )

    def __post_init__(self) -> None:
        self.autovaruna = _settings(self.autovaruna)
        resolve(self.autovaruna)
        init_process_group()
        super().__post_init__()


@dataclass
class TrainingArguments(ArgumentsMixin, transformers.TrainingArguments):
    """Those of transformers, with `autovaruna`: a dictionary of settings. See transformers.TrainingArguments."""


@dataclass
class Seq2SeqTrainingArguments(ArgumentsMixin, transformers.Seq2SeqTrainingArguments):
    """Those of transformers, with `autovaruna`: a dictionary of settings. See transformers.Seq2SeqTrainingArguments."""


def _generate_by(wrapper: ReferenceType[AutoVaruna]) -> Callable[..., Any]:
    """Returns a method of the model that generates through the wrapper, once stages have parts of the model."""

    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        own = wrapper()
        is_split = own is not None and own.module is model and own.plan is not None and own.plan.num_stages > 1
        is_within = getattr(owner_of_loop(model), OWN_CALL) is not None  # a call of the wrapper's
        if own is None or is_within or not is_split:
            return type(model).generate(model, *args, **kwargs)
        return own.generate(*args, **kwargs)

    return generate


def _ignores(function: Any, name: str) -> bool:
    """Whether a function has an argument that it does not read."""
    code: Any = getattr(function, "__code__", None)
    arguments = () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return name in arguments and name not in str([each.argval for each in dis.get_instructions(code)])


class MetricsCallback(transformers.TrainerCallback):
    """Has what Trainer logs of training, and so every tracker, carry ``model.metrics`` under ``autovaruna/``."""


def _filled(outputs: Any, size: int, num_own: int) -> Any:
    """Returns what a model gives for `num_own` samples, with zeros behind it for as many as other ranks have."""

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        has_samples = tensor.ndim > 0 and len(tensor) == num_own
        return torch.cat([tensor, tensor.new_zeros(size - num_own, *tensor.shape[1:])]) if has_samples else tensor

    return recursively_apply(fill, outputs)


class AutoVarunaMixin(_Other):
    """Has a Trainer train its model over all ranks: ``class MyTrainer(AutoVarunaMixin, transformers.Trainer)``.

    Raises:
        ConfigError: transformers does not see the ranks that the launcher has started, or is to shard the model itself.
    """

    model: Any
    gather_function: Any
    _whole: Any = None
    _is_in_loss = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.world_size != get_world_size():
            raise ConfigError(
                f"The training arguments know {self.args.world_size} process(es), but the launcher started "
                f"{get_world_size()}. Make them by autovaruna.integrations.transformers.TrainingArguments, or call "
                "autovaruna.init_process_group() before."
            )
        self.args.average_tokens_across_devices = True  # all ranks have the loss of the global batch
        others = [name for name in ("is_fsdp_enabled", "is_deepspeed_enabled") if getattr(self, name)]
        if others:
            raise ConfigError(f"AutoVaruna splits the model itself: got {others[0]}; leave `fsdp` and `deepspeed` out.")

    # the wrapper

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator, which finds the model in the wrapper as in DistributedDataParallel."""
        super().create_accelerator_and_postprocess()
        unwrap = self.accelerator.unwrap_model

        def unwrap_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return unwrap(model.module if isinstance(model, AutoVaruna) else model, *args, **kwargs)

        self.accelerator.unwrap_model = unwrap_model

    @property
    def _wrapper(self) -> AutoVaruna | None:
        """The wrapper around the model; None before the first training or evaluation."""
        return self.model_wrapped if isinstance(self.model_wrapped, AutoVaruna) else None

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Returns the wrapper of the model; its optimizer is made with it, for both train one model."""
        wrapper = self._wrapper
        if wrapper is None or wrapper.module is not self.model:
            if self.train_dataset is not None or self.optimizer is not None:
                self.create_optimizer()
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's stands around it
            settings = self._loss_settings | (getattr(self.args, "autovaruna", None) or {})
            if isinstance(self.model, transformers.PreTrainedModel):  # as saving does, or the next step traces again
                self.model.config.dtype = str(self.model.dtype).removeprefix("torch.")
                self.model.config.architectures = [type(self.model).__name__]
            wrapper = AutoVaruna(self.model, optimizer, scaler=self.accelerator.scaler, **settings)
            show_whole_state(wrapper, "call trainer.save_model(folder)")
            show_whole_calls(wrapper)
            self.model_wrapped = wrapper
            if hasattr(self.model, "generate") and self.args.world_size > 1:
                self.model.generate = MethodType(_generate_by(ref(wrapper)), self.model)
        return wrapper

    @property
    def _loss_settings(self) -> dict[str, Any]:
        """How losses of micro-batches join: a model that is told the batch's number of items sums and divides by it."""
        is_told = self.model_accepts_loss_kwargs and "labels" in self.label_names and self._has_own_loss
        if (code := self._own_compute_loss) is None:
            return {"reduction": "sum" if is_told and self._divides_by_items else "mean"}
        is_of_outputs = "logits" in (*code.co_names, *code.co_consts)  # though the model may have labels, and a loss
        return {"reduction": "mean", "loss_mode": "outputs" if is_of_outputs else "auto"}

    @property
    def _has_own_loss(self) -> bool:
        """Whether the loss is one that the model returns, and not one of its outputs' that this rank computes."""
        return self.label_smoother is None and self.compute_loss_func is None

    @property
    def _own_compute_loss(self) -> CodeType | None:
        """The code of a `compute_loss` in the place of transformers', which passes the items' number on; None: none."""
        known = (AutoVarunaMixin, transformers.Trainer)
        others = [vars(each).get("compute_loss") for each in type(self).__mro__ if each not in known]
        return next((each.__code__ for each in others if each and "super" not in each.__code__.co_names), None)

    @property
    def _divides_by_items(self) -> bool:
        """Whether the model's loss goes by the number of items: many take it among others, and return a mean."""
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        if not isinstance(model, transformers.PreTrainedModel):
            return True
        code = inspect.unwrap(type(model).forward).__code__
        if "num_items_in_batch" in (*code.co_names, *code.co_varnames, *code.co_consts):
            return True
        kind = model.config.problem_type or ("regression" if model.config.num_labels == 1 else None)
        is_mean = model.loss_function is ForSequenceClassificationLoss and kind in (
            "regression",
            "multi_label_classification",
        )
        return "loss_function" in code.co_names and not is_mean

    # the batch

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the batch as the model takes it, padded to the longest of all ranks', as one batch would be."""
        is_left = getattr(self.processing_class, "padding_side", "right") == "left"
        return padded_to_longest(super()._prepare_inputs(inputs), self._pad_value, is_left=is_left)

    def _pad_value(self, name: str) -> int:
        """Returns what stands where a sample has ended: what losses ignore in labels, the token of padding, zero."""
        sources = (self.processing_class, getattr(self.model, "config", None))
        tokens = [getattr(source, "pad_token_id", None) for source in sources]
        return pad_value(name, next((each for each in tokens if each is not None), 0), self.label_names)

    # the loss

    def compute_loss_context_manager(self) -> ExitStack:
        """Enters the autocast of `bf16` and `fp16`, which accelerate would put around the model's forward."""
        stack: ExitStack = super().compute_loss_context_manager()
        stack.enter_context(self.accelerator.autocast())
        return stack

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the loss of the global batch, which all ranks have; transformers scales one of this rank alone."""
        size, num_own = self._num_samples(inputs)
        if self._is_filled:
            inputs = slice_tensors(inputs, slice(num_own))
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        self._is_in_loss = True
        try:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        finally:
            self._is_in_loss = False
        if not return_outputs:
            return loss
        if num_own < size:
            outputs = _filled(outputs, size, num_own)
        return loss, outputs if self.model.training else convert_outputs_to_fp32(lambda: outputs)()

    @property
    def _is_filled(self) -> bool:
        """Whether accelerate has filled this last batch of an evaluation, on any rank; losses of ranks' own stay so."""
        state = self.accelerator.gradient_state
        is_last = not self.model.training and state.end_of_dataloader and state.remainder > 0
        return is_last and self._has_own_loss

    def _num_samples(self, inputs: dict[str, Any]) -> tuple[int, int]:
        """Returns the samples of this rank's batch, and how many of them do not only fill it."""
        size = find_batch_size(inputs) or 0
        remainder = self.accelerator.gradient_state.remainder if self._is_filled else 0
        return size, min(size, max(0, remainder - size * self.accelerator.process_index)) if remainder else size

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Trains a batch; ConfigError if the loss is made of the model's outputs where the model's own is expected."""
        loss = super().training_step(*args, **kwargs)
        wrapper = self._wrapper
        if wrapper is not None and wrapper.settings.reduction == "sum" and wrapper.loss_mode == "outputs":
            raise ConfigError(
                f"{type(self).__name__}: the loss is computed of the model's outputs on each rank, and those of ranks "
                "would be added up: got reduction='sum'. Expected the loss that the model returns; or pass "
                "TrainingArguments(autovaruna={'reduction': 'mean'}) for the mean over ranks, as in "
                "DistributedDataParallel."
            )
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, with the metrics of the last step if a `MetricsCallback` is among the callbacks."""
        if any(isinstance(each, MetricsCallback) for each in self.callback_handler.callbacks):
            metrics = self._wrapper.metrics.to_dict() if self._wrapper is not None and "loss" in logs else {}
            logs |= {f"autovaruna/{name}": value for name, value in metrics.items()}
        super().log(logs, *args, **kwargs)

    def get_tp_size(self) -> int:
        """Returns what divides the scale of the loss: the number of ranks, where the model makes the loss of all."""
        is_mean = self._has_own_loss or _ignores(self.compute_loss_func, "num_items_in_batch")
        if self._is_in_loss and self._wrapper is not None and is_mean:
            return int(self.accelerator.num_processes)
        return int(super().get_tp_size())

    # evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates each sample once, and lets go of the whole model that generation had."""
        gather = self.gather_function
        if getattr(self.args, "predict_with_generate", False):  # which keeps what fills a batch, and repeats losses
            self.gather_function = lambda each: (
                gather(each) if each.ndim == 1 else self.accelerator.gather_for_metrics(each)
            )
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._whole = None

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Predicts a batch; with `predict_with_generate` each rank gets what is generated for its own samples."""
        if not getattr(self.args, "predict_with_generate", False):
            return super().prediction_step(model, inputs, *args, **kwargs)
        with replaced(self, "model", self._whole_model()):
            return super().prediction_step(partial(self._call_on_own, model), inputs, *args, **kwargs)

    def _call_on_own(self, model: nn.Module, **inputs: Any) -> Any:
        """Calls the model with the samples that do not only fill the batch; what it returns has rows for those, too."""
        size, num_own = self._num_samples(inputs)
        if num_own == size:
            return model(**inputs)
        return _filled(model(**slice_tensors(inputs, slice(num_own))), size, num_own)

    def _whole_model(self) -> Any:
        """Returns the model that generates: a whole one on this rank if ours is split and has an encoder. Collective.

        Raises:
            ConfigError: the model has been split, and no whole one can be made of its configuration.
        """
        wrapper = self._wrapper
        if wrapper is None or wrapper.plan is None or wrapper.plan.num_stages == 1:
            return self.model
        if hasattr(self.model, "generate") and not has_encoder(self.model):
            return self.model  # which generates on all ranks
        if not isinstance(self.model, transformers.PreTrainedModel):
            raise ConfigError(
                f"predict_with_generate needs all weights on each rank: got {type(self.model).__name__}, which is "
                "split into stages; expected a PreTrainedModel, of which a whole one is made. Pass "
                "TrainingArguments(autovaruna={'num_stages': 1})."
            )
        if self._whole is None:
            self._whole = type(self.model)(copy.deepcopy(self.model.config)).to(self.args.device).eval()
            self._whole.load_state_dict(wrapper.state_dict())
            self._whole.generation_config = self.model.generation_config
        return self._whole

    # files

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves the whole model on rank 0; its state comes from all ranks. Collective."""
        if state_dict is None and self._wrapper is not None:
            state_dict = self._wrapper.state_dict()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves the whole optimizer's state on rank 0, and the scheduler's. Collective."""
        optimizer = self.optimizer.state_dict()
        if self.args.should_save:
            torch.save(optimizer, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_adapters(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model or self._wrapper)

    def _load_best_model(self) -> None:
        if not self._load_adapters(self.state.best_model_checkpoint):
            with replaced(self, "model", self._wrapper or self.model):
                super()._load_best_model()

    def _load_adapters(self, folder: str) -> bool:
        """Loads peft's adapters from a folder into the wrapper; False: there are none, or the model is not wrapped."""
        is_there = hasattr(self.model, "load_adapter") and Path(folder, ADAPTERS).exists()
        if self._wrapper is None or not is_there:
            return False
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(self._wrapper, load_peft_weights(folder), self.model.active_adapters[0])
        return True


class Trainer(AutoVarunaMixin, transformers.Trainer):
    """The Trainer of transformers, over all ranks of the launcher. See transformers.Trainer."""


class Seq2SeqTrainer(AutoVarunaMixin, transformers.Seq2SeqTrainer):
    """The Seq2SeqTrainer of transformers, over all ranks of the launcher. See transformers.Seq2SeqTrainer."""
