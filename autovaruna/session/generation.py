"""Has the ranks go through a method's calls of the model together: through the loop of transformers' ``generate``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from autovaruna._torch import replaced
from autovaruna.config.settings import input_groups
from autovaruna.errors import InputError, RankError
from autovaruna.graph.guards import HAS_UNFINISHED
from autovaruna.graph.methods import own_calls
from autovaruna.log import warn_once
from autovaruna.planner.records import Plan
from autovaruna.session.run import Run

logger = logging.getLogger(__name__)
_FULL = "full_attention"


def has_encoder(model: nn.Module) -> bool:
    """Whether a model of transformers has an encoder, which ``generate`` calls by itself."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def owner_of_loop(model: nn.Module) -> nn.Module:
    """Returns whose ``generate`` it is that calls itself: of a model with adapters of peft, that within."""
    outer: Any = model
    inner: nn.Module = outer.get_base_model() if hasattr(model, "get_base_model") else model
    return inner


@contextmanager
def calls_together(
    model: nn.Module,
    call: Callable[..., Any],
    parts: Mapping[nn.Module, Callable[..., Any]],
    counts: Callable[[], bool],
    run: Run,
) -> Iterator[_Loop]:
    """Has `call` run on all ranks where a method of the model calls the model, if that `counts`; else the model alone.

    `parts` has what is to run where it calls modules of the model.

    A rank whose samples have all ended goes on until those of the others have: it fills its rows, as in one batch.
    """
    inner = owner_of_loop(model)
    loop = _Loop(inner, call, counts, run)
    is_loop = hasattr(inner, HAS_UNFINISHED)
    with (
        own_calls({**parts, inner: loop.call}),
        replaced(inner, HAS_UNFINISHED, loop.has_unfinished) if is_loop else nullcontext(),
    ):
        yield loop


class _Loop:
    """The calls that one call of a method makes."""

    def __init__(self, model: nn.Module, call: Callable[..., Any], counts: Callable[[], bool], run: Run) -> None:
        self._model: Any = model
        self._call, self._counts, self._world = call, counts, run.world
        self._groups = input_groups(run.settings, run.world.num_ranks)
        self._has_masks: bool | None = None  # None: no call of it has counted yet
        self._digest = 0

    def options(self, name: str, given: dict[str, Any], plan: Plan | None) -> dict[str, Any]:
        """Returns the keywords of a method; those of ``generate`` leave out a cache that stages cannot keep.

        Raises:
            InputError: the model has an encoder that ``generate`` would call beside the wrapper.
        """
        if name != "generate" or not hasattr(self._model, HAS_UNFINISHED) or not self._counts():
            return given
        config, own = self._model.config, given.get("generation_config") or self._model.generation_config
        if has_encoder(self._model) and plan is not None and plan.num_stages > 1:
            raise InputError(
                f"generate of {type(self._model).__name__} calls the encoder by itself, beside the stages. Expected a "
                "model without an encoder, or num_stages=1, or predict_with_generate of our Seq2SeqTrainer, for which "
                "each rank makes a whole model."
            )
        decoder, beams = config.get_text_config(decoder=True), given.get("num_beams") or own.num_beams or 1
        is_sliding = getattr(decoder, "sliding_window", None) is not None
        layers = getattr(decoder, "layer_types", None) or ["sliding" if is_sliding else _FULL]
        others = sorted({*layers} - {_FULL}) + ["beams"] * (beams > 1) + ["an encoder"] * has_encoder(self._model)
        if not others or (own.use_cache if given.get("use_cache") is None else given["use_cache"]) is False:
            return given
        text = (
            f"generate goes without a key-value cache, which stages cannot keep here ({', '.join(others)}): tokens are "
            "the same, but each new one takes as long as the whole text"
        )
        warn_once(logger, self._model, text)
        return {**given, "use_cache": False}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, with a mask if another rank has one: transformers drops those that mask nothing."""
        if not self._counts():
            return self._model(*args, **kwargs)
        if torch.is_grad_enabled() or not hasattr(self._model, HAS_UNFINISHED):
            return self._call(*args, **kwargs)
        if self._has_masks is None:
            is_masked = "attention_mask" in kwargs
            self._has_masks = self._world.is_on_any(is_masked, "agreeing on masks of prompts")
        given = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        tokens: Tensor | None = next((each for each in given if each is not None), None)
        if tokens is not None:
            is_shared = tokens.dim() == 2 and any(len(ranks) > 1 for ranks in self._groups)
            self._digest = crc32(tokens.cpu().contiguous().numpy().tobytes()) if is_shared else 0
            if self._has_masks:
                cache = kwargs.get("past_key_values")
                length = tokens.shape[1] + (0 if cache is None else cache.get_seq_length())
                ones = torch.ones(len(tokens), length, dtype=torch.long, device=tokens.device)
                kwargs["attention_mask"] = kwargs.pop("attention_mask", ones)  # in one place on all ranks
        return self._call(*args, **kwargs)

    def has_unfinished(self, this_peer_finished: bool, *_: Any, **__: Any) -> bool:
        """Whether a rank still has samples that have not ended.

        Raises:
            RankError: ranks that pass the same samples have drawn other tokens; the same on every rank.
        """
        if self._has_masks is None:
            return not this_peer_finished
        own = (float(not this_peer_finished), float(self._digest))
        found = self._world.gather_numbers(own, "agreeing on sequences that have not ended")
        for ranks in self._groups:
            if len({found[rank][1] for rank in ranks}) > 1:
                raise RankError(
                    f"Ranks {list(ranks)}, which pass the same samples, go on with other tokens. Expected the same "
                    "prompts on each of them, and the same draws: call torch.manual_seed(...) with one number on all "
                    "ranks before generate(do_sample=True)."
                )
        return any(each[0] for each in found)
