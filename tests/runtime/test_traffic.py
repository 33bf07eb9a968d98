"""What a step receives and sends is worked out once for all steps of one batch size."""

from __future__ import annotations

from typing import Any

import pytest

from autovaruna.runtime.batch import Traffic
from tests.catalogue import PLAIN
from tests.reference import sgd
from tests.session.training import Setup, train

pytestmark = pytest.mark.timeout(60)
CASE = next(case for case in PLAIN if case.max_stages >= 2).without_dropout()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_later_steps_work_out_no_messages(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    act = Traffic._act

    def noted(self: Traffic, *args: Any) -> Any:
        made.append(args)
        return act(self, *args)

    monkeypatch.setattr(Traffic, "_act", noted)
    sizes = [8, 5, 8, 5, 8]
    setup = Setup(((0,), (1,)), 4, settings={"reduction": reduction})
    train(CASE, setup, [CASE.batch(size, step) for step, size in enumerate(sizes)], sgd)
    forwards_and_backwards_of_two_stages = 4 * 4
    assert len(made) == len(set(sizes)) * forwards_and_backwards_of_two_stages
