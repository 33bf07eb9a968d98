"""Trains a small GPT-2 with Trainer, plain on one process or over the ranks; run as a module, on ranks of torchrun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from tests.integrations import SETTINGS

BATCH, STEPS, SAVED = 6, 4, 2
TRAINERS = transformers.Trainer, transformers.Seq2SeqTrainer
"""Named here, for the library imports what is named: the ranks are forked from a process that has done so."""
ROWS, LENGTH, WORDS = 36, 8, 31
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "lora": {
        **{"load_best_model_at_end": True, "save_total_limit": 1},
        **{"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    },
    "translation": {"predict_with_generate": True, "generation_max_length": 6},
    "answers": {"predict_with_generate": True, "generation_max_length": LENGTH},
    "regression": {"gradient_accumulation_steps": 2},  # the model takes the number of items, and does not go by it
    "loss of outputs": {},
    "loss function": {"gradient_accumulation_steps": 2},  # which gets the number of items, and does not go by it
}
OF_OUTPUTS = ("loss of outputs", "loss function")


def model_of(case: str) -> Any:
    transformers.set_seed(0)
    if case == "translation":
        sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        config = T5Config(**sizes, **tokens, dropout_rate=0.0)
        return T5ForConditionalGeneration(config)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    if case in ("regression", *OF_OUTPUTS):
        config.num_labels, config.pad_token_id = 1 if case == "regression" else 3, WORDS - 1
        return transformers.GPT2ForSequenceClassification(config)
    config.pad_token_id = 0 if case == "answers" else None
    model = GPT2LMHeadModel(config)
    if case != "lora":
        return model
    options = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    return get_peft_model(model, LoraConfig(**options))


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Puts samples of a length of their own each into a batch; other ranks may have a longer one."""
    lengths = [3 + int(row["input_ids"].sum()) % (LENGTH - 2) for row in rows]
    tokens = [row["input_ids"][:length] for row, length in zip(rows, lengths, strict=True)]
    inputs = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = torch.arange(inputs.shape[1]) < torch.tensor(lengths)[:, None]
    labels = torch.stack([row["labels"] for row in rows])
    return {"input_ids": inputs, "attention_mask": mask.long(), "labels": labels}


def rows(case: str = "usual") -> list[dict[str, torch.Tensor]]:
    """Returns samples of which other numbers of tokens count, or one label each."""
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=chance)
    labels = tokens.masked_fill(torch.arange(LENGTH) < torch.randint(1, 6, (ROWS, 1), generator=chance), -100)
    if case == "answers":  # of a split model
        tokens, labels = tokens[:, : LENGTH - 2], tokens[:, : LENGTH - 2]
    if case in ("regression", *OF_OUTPUTS):
        labels = tokens[:, 0] / WORDS if case == "regression" else tokens[:, 0] % 3
    return [{"input_ids": tokens[i], "labels": labels[i]} for i in range(ROWS)]


def with_loss_of_outputs(kind: Any) -> Any:
    """Returns a Trainer that makes the loss of what the model returns, which has labels and a loss as well."""

    class Weighted(kind):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], label_smoothing=0.2)
            return (loss, outputs) if return_outputs else loss

    return Weighted


def smoothed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.2)


def accuracy(found: Any) -> dict[str, float]:
    is_generated = found.predictions.ndim == 2
    right = found.predictions if is_generated else found.predictions.argmax(-1) == found.label_ids
    return {"right": float(right.sum()), "samples": len(found.label_ids)}


def train(case: str, folder: Path, num_ranks: int, resume: str | None = None) -> list[dict[str, float]]:
    """Returns what Trainer logs at each step; 0 ranks are those of plain transformers."""
    if num_ranks:
        from autovaruna.integrations import transformers as library
    else:
        library = transformers  # type: ignore[assignment]
    size = BATCH // (num_ranks or 1)
    options = CASES[case] | ({"autovaruna": SETTINGS} if num_ranks else {})
    kind, data = "Seq2Seq" if case in ("translation", "answers") else "", rows(case)
    evaluated = 12 if case in ("lora", *OF_OUTPUTS) else 8  # 8: this rank, or another, has none of the last batch
    args = getattr(library, f"{kind}TrainingArguments")(
        output_dir=str(folder), per_device_train_batch_size=size, per_device_eval_batch_size=size, max_steps=STEPS,
        logging_steps=1, save_steps=SAVED, eval_steps=SAVED, eval_strategy="steps", report_to=[], learning_rate=0.01,
        use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    trainer_of = getattr(library, f"{kind}Trainer")
    trainer = (with_loss_of_outputs(trainer_of) if case == "loss of outputs" else trainer_of)(
        model=model_of(case), args=args, train_dataset=data, eval_dataset=data[:evaluated], compute_metrics=accuracy,
        data_collator=padded if case == "translation" else None,
        callbacks=[library.MetricsCallback()] if num_ranks else None,
        compute_loss_func=smoothed if case == "loss function" else None,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    assert not any(each.is_meta for each in trainer.model.state_dict().values())  # which is the whole model's
    kept = ("step", "loss", "grad_norm", "eval_loss", "eval_right", "eval_samples")
    history = trainer.state.log_history
    if num_ranks:
        check_metrics([row for row in history if "loss" in row])
    found = [{name: row[name] for name in kept if name in row} for row in history]
    return found + ([{"step": -1, **generated(trainer)}] if case == "usual" and resume is None else [])


def generated(trainer: Any) -> dict[str, int]:
    """Returns the tokens that the trained model goes on with."""
    prompts = torch.arange(6).reshape(2, 3)
    tokens = trainer.model.eval().generate(input_ids=prompts, max_new_tokens=4, pad_token_id=0)
    return {str(place): int(token) for place, token in enumerate(tokens[:, 3:].flatten())}


def check_metrics(rows: list[dict[str, float]]) -> None:
    """Makes sure that what Trainer logs carries the metrics, and that they say what Trainer says itself."""
    norms = {row["autovaruna/gradient_norm"] for row in rows if "autovaruna/gradient_norm" in row}
    own = [row["grad_norm"] for row in rows]
    assert norms and all(any(abs(norm - each) < 1e-4 * each for each in own) for norm in norms), (norms, own)
    for row in rows:
        assert row["autovaruna/samples_per_second"] > 0 and row["autovaruna/seconds/optimizer"] > 0, row


def train_all(cases: list[str], folder: Path, num_ranks: int) -> dict[str, Any]:
    """Returns what Trainer logs in each case, and on ranks the error of another one."""
    found: dict[str, Any] = {case: train(case, folder / case, num_ranks) for case in cases}
    return found | ({"outer": refuse_outer_loss(folder / "outer")} if num_ranks else {})


def refuse_outer_loss(folder: Path) -> str:
    """Returns the error of a loss that is made of outputs where ranks' losses would be added up."""
    from autovaruna.integrations.transformers import Trainer, TrainingArguments

    class Outer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            return torch.nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())

    settings = {**SETTINGS, "reduction": "sum"}
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, max_steps=1, report_to=[], autovaruna=settings)
    try:
        Outer(model=model_of("usual"), args=args, train_dataset=rows()).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    found = train("usual", Path(sys.argv[1], "usual"), int(os.environ["WORLD_SIZE"]), sys.argv[2])
    Path(sys.argv[1], f"found{os.environ['RANK']}.json").write_text(json.dumps(found))
