"""Generates with small language models of transformers, plain on one process or with stages on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autovaruna import AutoVaruna, AutoVarunaError
from autovaruna.ranks.environment import get_world
from tests.integrations import SETTINGS

WORDS, LENGTH, PADS = 40, 5, [0, 2, 0, 1]
GREEDY: dict[str, Any] = {"max_new_tokens": 10, "pad_token_id": 0}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.7}
WITHOUT = {**GREEDY, "use_cache": False}
Tokens = list[list[int]]
Found = tuple[list[Tokens], int, int]


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    tokens: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0, "vocab_size": WORDS}
    tokens |= {"tie_word_embeddings": False, "initializer_range": 0.5}  # or each row goes on with its last token
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=16, n_layer=2, n_head=2, **tokens)).eval()
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=24, **heads, **tokens)).eval()


def prompts(first: int = 0, last: int = len(PADS)) -> dict[str, torch.Tensor]:
    """Returns rows of prompts, padded on the left."""
    tokens = torch.randint(1, WORDS, (len(PADS), LENGTH), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(LENGTH) >= torch.tensor(PADS)[:, None]).long()
    return {"input_ids": (tokens * mask)[first:last], "attention_mask": mask[first:last]}


def generate(model: Any, options: dict[str, Any], first: int, last: int) -> Tokens:
    torch.manual_seed(3)
    tokens: Tokens = model.generate(**prompts(first, last), **options).tolist()
    return tokens


def end_of(kind: str) -> int:
    """Returns a token that the first row generates before the others do."""
    rows = generate(model_of(kind), GREEDY, 0, len(PADS))
    return next(each for each in rows[0][LENGTH:] if each not in rows[1][LENGTH:])


def on_ranks(kind: str, runs: list[tuple[dict[str, Any], int, int]], settings: dict[str, Any]) -> Found:
    """Returns what is generated in each run, and the numbers of traces and of stages."""
    model = AutoVaruna(model_of(kind), **{**SETTINGS, **settings})
    found = [generate(model, *run) for run in runs]
    assert model.plan is not None
    return found, model.num_traces, model.plan.num_stages


def on_each(kind: str, options: dict[str, Any], borders: list[int], settings: dict[str, Any]) -> Found:
    """Does so for rows of its own on each rank."""
    rank = get_world().rank
    return on_ranks(kind, [(options, borders[rank], borders[rank + 1])], settings)


@contextmanager
def _recorded(found: list[str]) -> Iterator[None]:
    try:
        yield
    except AutoVarunaError as error:
        found.append(f"{type(error).__name__}: {error}")


def by_hand() -> tuple[list[Any], list[str]]:
    """Returns what calls with a cache give beside those without, the length of the cache, and what is refused."""
    model, plain = (AutoVaruna(model_of("gpt2"), inputs="replicated", **SETTINGS), model_of("gpt2"))
    tokens, cache, errors = prompts()["input_ids"], DynamicCache(), list[str]()
    with torch.no_grad():
        model(tokens[:, :3], past_key_values=cache)
        found = model(tokens[:, 3:], past_key_values=cache).logits
        expected = plain(tokens).logits[:, 3:]
        with _recorded(errors):
            model(tokens[:2, 3:], past_key_values=cache)
        with _recorded(errors):
            cache.layers[0].keys + 1
    torch.manual_seed(get_world().rank)
    with _recorded(errors):
        model.generate(**prompts(), **SAMPLED)
    return [float((found - expected).abs().max()), cache.get_seq_length()], errors
