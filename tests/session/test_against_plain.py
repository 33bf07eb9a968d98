"""Holds steps to plain PyTorch on the whole global batch, dropout off: DESIGN.md 6.1 to 6.3."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from autovaruna import AutoVaruna, InputError
from tests.catalogue import CASES, HUGGING_FACE, Batch, Case
from tests.products import diagonal, some
from tests.reference import Record, adamw, compare, gradients_of, micro_batches, plain_micro_batched, plain_steps
from tests.session.training import Setup, merge, needs_own_autograd, on_ranks, pipeline, share_of, train

STEPS = 3


def batches_of(case: Case, sizes: Sequence[int]) -> list[Batch]:
    return [case.batch(size, step) for step, size in enumerate(sizes)]


@pytest.mark.parametrize("case", some(HUGGING_FACE[1:], 2), ids=str)
def test_a_hugging_face_model_trains_as_plain_pytorch(case: Case) -> None:
    """Other models are those of `test_drawn` and `tests.graph.test_blocks`."""
    pytest.importorskip("transformers")
    case = case.without_dropout()
    batches = batches_of(case, [7] * STEPS)
    found = train(case, Setup(((0,), (1, 0)), 3), batches, adamw)
    parts = [micro_batches(batch, 3 if case.has_batch_norm else 1) for batch in batches]
    expected = plain_micro_batched(case, parts, adamw)
    compare(replace(found, buffers={}), replace(expected, buffers={}))


HOWS = ["no_sync", "delay", "delay of two"]


@pytest.mark.parametrize(
    ("how", "name"), diagonal(HOWS, ["tied_three_ways", "outputs_tuple", "two_losses", "outputs_tuple", "chain"])
)
def test_gradients_are_summed_over_ranks_once(how: str, name: str) -> None:
    """Of three backwards; what holds when a backward comes counts."""
    case = CASES[name]
    sizes = [[4, 3, 2], [1, 0, 5], [2, 2, 2]]
    batches = batches_of(case, [sum(each) for each in sizes])
    setup = Setup(((0,), (1, 2)), 6, settings={"inputs": "per_rank"})
    needs_own_autograd(case, setup)

    def run(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Record:
        for place, (batch, each) in enumerate(zip(batches, sizes, strict=True)):
            own = share_of(batch, each, rank)
            with model.no_sync() if how == "no_sync" and place < 2 else nullcontext():
                loss = case.loss_of(model(*own[0], **own[1]), own)
                if how != "no_sync":
                    model.delay_grad_allreduce(how == "delay" or place < 2)
                assert all(parameter.grad is None for parameter in model.parameters())
                loss.backward()
        if how == "delay":
            model.allreduce_grads()
        return Record(gradients=[gradients_of(model)])

    expected = plain_steps(case, batches, num_accumulated=3).gradients
    compare(merge(on_ranks(setup, case, run)), Record(gradients=expected))


def test_batch_norm_statistics_are_those_of_replica_0() -> None:
    case = CASES["conv_net_batch_norm"]
    batch = case.batch(8, 0)
    got = train(case, Setup(((0, 1),), 4), [batch], torch.optim.SGD)
    model = case.model()
    for each in micro_batches(batch, 4)[::2]:
        model(**each[1])
    expected = {name: value for name, value in model.state_dict().items() if name in got.buffers}
    expected["body.1.num_batches_tracked"] = torch.tensor(1)  # it counts calls
    compare(Record(buffers=got.buffers), Record(buffers=expected))


def test_a_micro_batch_of_one_sample_is_too_small_for_batch_norm() -> None:
    case = CASES["batch_norm"]
    with pytest.raises(InputError, match="leaves batch_norm one value for each of 12 channels"):
        train(case, pipeline(2, num_micro_batches=4), [case.batch(7, 0)])
    train(CASES["conv_net_batch_norm"], pipeline(2, num_micro_batches=4), [CASES["conv_net_batch_norm"].batch(7, 0)])
