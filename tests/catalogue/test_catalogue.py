"""Holds the catalogue to its word, with plain PyTorch alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.catalogue import CASES, Case, batch_size, tensors
from tests.reference import part

ALL = pytest.mark.parametrize("case", CASES.values(), ids=str)
SIZE = 6


def loss_of(case: Case, seed: int = 1) -> Tensor:
    """Returns the loss of a new model on a batch, from one state of torch's generator."""
    model, batch = case.model(), case.batch(SIZE, seed)
    torch.manual_seed(7)
    return case.loss_of(model(*batch[0], **batch[1]), batch)


@ALL
def test_a_step_gives_finite_gradients(case: Case) -> None:
    model, batch = case.model(), case.batch(SIZE, 1)
    loss = case.loss_of(model(*batch[0], **batch[1]), batch)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert loss.isfinite() and gradients and all(gradient.isfinite().all() for gradient in gradients)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@ALL
def test_model_and_batch_depend_on_their_seed_alone(case: Case) -> None:
    state = torch.random.get_rng_state()
    first, second, other = case.model(0), case.model(0), case.model(1)
    same, batch, changed = case.batch(SIZE, 1), case.batch(SIZE, 1), case.batch(SIZE, 2)
    assert torch.equal(state, torch.random.get_rng_state())
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors(batch), tensors(same), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(tensors(batch), tensors(changed), strict=True))


@ALL
def test_batches_have_their_size(case: Case) -> None:
    for size in (1, 2, 5):
        assert batch_size(case.batch(size, 0)) == size
        assert sum(tensor.shape[0] == size for tensor in tensors(case.batch(size, 0))) >= 1


@ALL
def test_random_numbers_are_drawn_only_where_declared(case: Case) -> None:
    model, batch = case.model(), case.batch(SIZE, 1)
    before = torch.random.get_rng_state()
    model(*batch[0], **batch[1])
    assert torch.equal(before, torch.random.get_rng_state()) != case.has_dropout


@ALL
def test_without_dropout_nothing_is_random(case: Case) -> None:
    quiet = case.without_dropout()
    if quiet.has_dropout:
        assert quiet.is_always_random
        return
    model, batch = quiet.model(), quiet.batch(SIZE, 1)
    before = torch.random.get_rng_state()
    model(*batch[0], **batch[1])
    assert torch.equal(before, torch.random.get_rng_state())
    assert case.has_dropout == (not torch.equal(loss_of(case), loss_of(quiet)))


@ALL
def test_the_loss_is_the_mean_over_the_samples(case: Case) -> None:
    quiet = case.without_dropout()
    if quiet.has_dropout or case.has_batch_norm:
        pytest.skip("samples are not independent")
    model, batch = quiet.model(), quiet.batch(SIZE, 1)
    with torch.no_grad():
        whole = quiet.loss_of(model(*batch[0], **batch[1]), batch)
        parts = [part(batch, start, stop) for start, stop in ((0, 1), (1, 3), (3, SIZE))]
        losses = [quiet.loss_of(model(*p[0], **p[1]), p) * batch_size(p) / SIZE for p in parts]
    torch.testing.assert_close(torch.stack(losses).sum(), whole, rtol=1e-5, atol=1e-7)
