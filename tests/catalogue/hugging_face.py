"""Lists models of the library transformers, as small as their configurations allow, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.catalogue.case import Batch, Case, floats, generator, integers

WORDS = 67
TOKENS = 10
WIDTH = 32
LAYERS = 3
HEADS = 4

ENDS = {"bos_token_id": 1, "eos_token_id": 2}
GPT = {"vocab_size": WORDS, "n_positions": 16, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, **ENDS}
HIDDEN = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 48}
ENCODER = {**HIDDEN, "vocab_size": WORDS, "max_position_embeddings": 16, "pad_token_id": 0}
LLAMA = {**ENCODER, "num_key_value_heads": 2, **ENDS}
SIDE = {"layers": 2, "attention_heads": HEADS, "ffn_dim": 48}
SEQUENCE = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDE.items()}
SEQUENCE |= {"vocab_size": WORDS, "d_model": WIDTH, "pad_token_id": 0, "decoder_start_token_id": 1, **ENDS}
PICTURE = {"image_size": 32, "patch_size": 8, "num_labels": 5}
STEPS = {"depths": [1, 1], "num_labels": 5}


def language(size: int, seed: int) -> Batch:
    """Returns words, each of them a label too: every sample has equally many."""
    words = integers(WORDS - 3, size, TOKENS, of=generator(seed)) + 3
    return (), {"input_ids": words, "labels": words.clone()}


def masked(size: int, seed: int) -> Batch:
    """Returns words with an attention mask and labels at every place."""
    return (), {**language(size, seed)[1], "attention_mask": torch.ones(size, TOKENS, dtype=torch.int64)}


def padded(size: int, seed: int) -> Batch:
    """Returns sentences of differing length under a mask, and one class a sentence."""
    g = generator(seed)
    words = integers(WORDS - 3, size, TOKENS, of=g) + 3
    mask = (torch.arange(TOKENS) < integers(TOKENS - 3, size, 1, of=g) + 3).long()
    return (), {"input_ids": words * mask, "attention_mask": mask, "labels": integers(2, size, of=g)}


def translation(size: int, seed: int) -> Batch:
    g = generator(seed)
    both = [integers(WORDS - 3, size, num, of=g) + 3 for num in (TOKENS, TOKENS - 2)]
    return (), {"input_ids": both[0], "labels": both[1]}


def pictures(size: int, seed: int) -> Batch:
    """Returns ``pixel_values`` of shape (size, 3, 32, 32) and one class a picture."""
    g = generator(seed)
    return (), {"pixel_values": floats(size, 3, 32, 32, of=g), "labels": integers(5, size, of=g)}


def painted(size: int, seed: int) -> Batch:
    return (), {**pictures(size, seed)[1], "labels": integers(5, size, 32, 32, of=generator(seed))}


def speech(size: int, seed: int) -> Batch:
    """Returns ``input_features`` of shape (size, 8, 24) and words."""
    g = generator(seed)
    return (), {"input_features": floats(size, 8, 24, of=g), "labels": integers(WORDS - 3, size, 6, of=g) + 3}


def waves(size: int, seed: int) -> Batch:
    """Returns ``input_values`` of shape (size, 800) and one class each."""
    g = generator(seed)
    return (), {"input_values": floats(size, 800, of=g), "labels": integers(2, size, of=g)}


def shown(size: int, seed: int) -> Batch:
    """Returns pictures, each in the first four places of a sentence."""
    pixels = floats(size, 3, 16, 16, of=generator(seed))
    words = language(size, seed)[1]["input_ids"] % 60 + 3
    words[:, :4] = WORDS - 1
    return (), {"input_ids": words, "pixel_values": pixels, "labels": words.where(words < WORDS - 1, -100)}


def captioned(size: int, seed: int) -> Batch:
    """Returns pictures and words that belong together; the model makes a contrastive loss."""
    words = language(size, seed)[1]["input_ids"]
    return (), {"input_ids": words, "pixel_values": pictures(size, seed)[1]["pixel_values"], "return_loss": True}


def make(model: str, config: str, fields: dict[str, Any]) -> nn.Module:
    """Returns a transformers model of a class and a configuration, both by name."""
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**fields))


def case(
    name: str,
    model: str,
    fields: dict[str, Any],
    batch: Callable[[int, int], Batch] = language,
    config: str = "",
    has_dropout: bool = True,
    **more: Any,
) -> Case:
    """Returns the case of a transformers class; its configuration's class is ``<family>Config``."""
    family = model.split("For")[0].split("LMHead")[0].removesuffix("Model")
    build = partial(make, model, config or f"{family}Config", fields)
    return Case(name, build, batch, has_dropout=has_dropout, needs="transformers", **more)


T5 = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": HEADS}
WHISPER = {**SEQUENCE, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16}
VIT = {**PICTURE, **HIDDEN}
RESNET = {**STEPS, "embedding_size": 8, "hidden_sizes": [8, 16], "layer_type": "basic"}
DROPS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}

HUGGING_FACE = (
    case("gpt2", "GPT2LMHeadModel", GPT),
    case("bert", "BertForMaskedLM", ENCODER, masked),
    case("t5", "T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, translation),
    case("llama", "LlamaForCausalLM", LLAMA, has_dropout=False),
    case("vit", "ViTForImageClassification", {**VIT, **DROPS}, pictures),
    case("resnet", "ResNetForImageClassification", RESNET, pictures, has_dropout=False, has_batch_norm=True),
    case("whisper", "WhisperForConditionalGeneration", {**WHISPER, "dropout": 0.1}, speech),
)

MOE = {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2}
CONVNEXT = {**STEPS, "hidden_sizes": [8, 16], "drop_path_rate": 0.2, "layer_scale_init_value": 0.5, "num_stages": 2}
SWIN = {**STEPS, "image_size": 32, "patch_size": 4, "embed_dim": 8, "num_heads": [2, 2], "window_size": 4}
DEBERTA = {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}
MAMBA = {"vocab_size": WORDS, "hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": 2, "pad_token_id": 0}
SEGFORMER = {**STEPS, "num_encoder_blocks": 2, "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "decoder_hidden_size": 16}
SEGFORMER |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
OPT = {**LLAMA, "ffn_dim": 48, "word_embed_proj_dim": WIDTH}
DISTIL = {"vocab_size": WORDS, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 48}
GEMMA = {**LLAMA, "head_dim": 8}
BLOOM = {"vocab_size": WORDS, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "hidden_dropout": 0.1}
WAV2VEC = {**ENCODER, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
WAV2VEC |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2}
MAE = {**VIT, "decoder_hidden_size": 16, "decoder_intermediate_size": 32, "decoder_num_hidden_layers": 1}
MAE |= {"decoder_num_attention_heads": 2}

SIGLIP = {**VIT, "model_type": "siglip_vision_model", "image_size": 16, "num_hidden_layers": 1, "projection_dim": WIDTH}
SIGLIP |= {"vision_use_head": False}
PALIGEMMA = {"vision_config": SIGLIP, "text_config": {**GEMMA, "model_type": "gemma"}, "image_token_id": WORDS - 1}
PALIGEMMA |= {"projection_dim": WIDTH, "hidden_size": WIDTH}
CLIP = {"text_config": {**ENCODER, **ENDS}, "vision_config": {**VIT, "num_hidden_layers": 2}, "projection_dim": 16}

MORE = (
    case("bart", "BartForConditionalGeneration", SEQUENCE, translation),
    case("mixtral", "MixtralForCausalLM", MOE, has_dropout=False),
    case("convnext", "ConvNextForImageClassification", CONVNEXT, pictures),
    case("swin", "SwinForImageClassification", {**SWIN, **DROPS}, pictures),
    case("deberta_v2", "DebertaV2ForMaskedLM", DEBERTA, masked),
    case("mamba", "MambaForCausalLM", MAMBA, has_dropout=False),
    case("gpt_neox", "GPTNeoXForCausalLM", {**ENCODER, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    case("qwen3", "Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}, has_dropout=False),
    case("segformer", "SegformerForSemanticSegmentation", SEGFORMER, painted, has_batch_norm=True),
    case("albert", "AlbertForMaskedLM", {**ENCODER, **DROPS, "embedding_size": 16}, masked),
    case("electra", "ElectraForMaskedLM", {**ENCODER, "embedding_size": 16}, masked),
    case("opt", "OPTForCausalLM", OPT),
    case("distilbert", "DistilBertForSequenceClassification", {**DISTIL, "max_position_embeddings": 16}, padded),
    case("roberta", "RobertaForSequenceClassification", ENCODER, padded),
    case("gemma", "GemmaForCausalLM", GEMMA, has_dropout=False),
    case("phi", "PhiForCausalLM", {**LLAMA, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    case("bloom", "BloomForCausalLM", BLOOM),
    case("paligemma", "PaliGemmaForConditionalGeneration", PALIGEMMA, shown, "PaliGemmaConfig", has_dropout=False),
    case("vit_mae", "ViTMAEForPreTraining", MAE, pictures, is_always_random=True),
)

REFUSED = (
    case("clip", "CLIPModel", CLIP, captioned, has_dropout=False, has_batch_norm=True),
    case("wav2vec2", "Wav2Vec2ForSequenceClassification", WAV2VEC, waves, is_always_random=True),
)
"""What may be refused: a contrastive loss, which compares samples, and layers that are dropped by numpy's generator."""
