"""Each wrong result of a peer, as a story: what the peer did, what it got, and that it is right here.

"tdp" is torch.distributed.pipelining of torch 2.13.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch

from tests.catalogue import CASES
from tests.mpi import peers
from tests.mpi.launch import run_on_ranks
from tests.reference import Record, bit_equal, compare, gradients_of, part, plain_micro_batched, plain_steps, ranges
from tests.session.training import merge

STORIES = [
    name for name, value in vars(peers).items() if inspect.isfunction(value) and value.__module__ == peers.__name__
]
STORIES.remove("train")


@cache
def job() -> list[dict[str, Any]]:
    """Runs all stories in one job."""
    return run_on_ranks(2, "tests.mpi.numbers:stories", STORIES)


def of_ranks(story: str) -> list[Any]:
    """Returns what each rank returned."""
    return [rows[story] for rows in job()]


def chain_of_7() -> Record:
    """Trains with plain PyTorch."""
    case = CASES["chain"]
    return plain_steps(case, [case.batch(7, step) for step in range(3)])


@pytest.mark.parametrize("name", peers.PLAIN)
def test_what_peers_do_not_train(name: str) -> None:
    """One weight in two stages, a value of several later stages, an input of a later one, other sizes, and keywords.

    tied: tdp 1 has a copy per stage, never synchronised; gradient norm 0.32 in place of 0.50.
    three_users: tdp 4 says "Backward of skip connections not supported yet".
    late: tdp 5 and 6 raise on one rank while the other waits for 30 minutes; a dict between stages is refused.
    chain: tdp 6 crashes on 18 samples in 4 micro-batches; Varuna gives each of the last one's samples too much weight.
    keywords: RaNNC rejects keyword arguments.
    """
    case, size, _ = peers.PLAIN[name]
    expected = plain_steps(case, [case.batch(size, step) for step in range(3)])
    compare(merge([each[name] for each in of_ranks("trained")]), expected)


def test_gradients_accumulate() -> None:
    """tdp 2: in a second step without zeroing, the first gradient is divided a second time."""
    model = CASES["chain"].model()
    for seed in (0, 1):
        model(**CASES["chain"].batch(8, seed)[1]).backward()
    found = {name: value for rank in of_ranks("two_steps_without_zeroing") for name, value in rank.items()}
    compare(Record(gradients=[found]), Record(gradients=[gradients_of(model)]))


def test_batch_norm_sees_the_samples_alone() -> None:
    """tdp 3: running statistics are those of uninitialised memory, off by 9e35: it infers shapes by running forward."""
    case = CASES["batch_norm"]
    steps = [[part(case.batch(8, step), *bounds) for bounds in ranges(8, 4)] for step in range(3)]
    for found in of_ranks("batch_norm_statistics"):
        compare(Record(buffers=found), Record(buffers=plain_micro_batched(case, steps).buffers))


def test_evaluation_is_without_dropout_and_in_between() -> None:
    """tdp 7: eval() leaves dropout on. Varuna: evaluate() is broken for 2 stages. RaNNC: the mode is frozen."""
    case = CASES["dropout"]
    for first, losses, second in of_ranks("evaluation"):
        model = case.model().eval()
        model.load_state_dict(first.weights)
        expected = [model(**case.batch(size, 5)[1]).detach() for size in (8, 8, 3)]
        compare(Record(losses), Record(expected))
        assert losses[0] == losses[1] and second.losses[0] != first.losses[0]


def test_evaluation_gives_each_rank_its_own_outputs() -> None:
    """Varuna: evaluate() returns nothing on the stages before the last."""
    case = CASES["returned_scores"]
    expected = case.model().eval()(*case.batch(7, 0)[0]).detach()
    found = of_ranks("evaluation_of_own_samples")
    assert [len(scores) for scores in found] == [5, 2]
    torch.testing.assert_close(torch.cat(found), expected)


def test_recompute_repeats_the_masks_of_its_forward() -> None:
    """Varuna: recompute leaves the generator elsewhere, so masks of backward are not those of forward."""
    recomputed, kept = (merge(records) for records in zip(*of_ranks("dropout_after_recompute"), strict=True))
    bit_equal(recomputed, kept)


def test_masks_do_not_repeat() -> None:
    """Varuna: the generator is not put back after recompute, so that masks repeat from micro-batch to micro-batch."""
    for masks in of_ranks("masks_of_two_micro_batches"):
        assert len({tuple(row.tolist()) for row in masks}) == 4


def test_replicas_stay_equal() -> None:
    """Varuna: in float32 the reduced gradients are thrown away, and replicas diverge; the loss is one replica's."""
    (first, own), (second, other) = of_ranks("replicas")
    compare(merge([first, second]), chain_of_7())
    compare(Record(weights=own), Record(weights=other), rtol=1e-6)


def test_uneven_ranks_are_not_padded() -> None:
    """RaNNC: uneven mini-batches are padded with repeated samples, which enter the loss."""
    (first, loss), (second, other) = of_ranks("uneven_ranks")
    assert loss != other
    compare(merge([first, second]), chain_of_7())


def test_the_state_has_its_buffers_and_loads_after_the_start() -> None:
    """RaNNC: state_dict() drops buffers; load_state_dict() fails once training has started."""
    model = CASES["conv_net_batch_norm"].model()
    for before, after, loaded in of_ranks("state_of_batch_norm"):
        assert list(before) == list(after) == list(model.state_dict())
        assert after["body.1.num_batches_tracked"] == 1 and not torch.equal(
            *(s["body.1.running_mean"] for s in (before, after))
        )
        assert all(torch.equal(loaded[name], value) for name, value in after.items())
        model.load_state_dict(after)


def test_inputs_get_gradients() -> None:
    """RaNNC: input gradients are discarded."""
    case = CASES["chain"]
    batch = case.batch(7, 0)[1]
    x = batch["x"].clone().requires_grad_()
    case.model()(x=x, y=batch["y"]).backward()
    torch.testing.assert_close(torch.cat(of_ranks("input_gradients")), x.grad, rtol=1e-5, atol=1e-7)
