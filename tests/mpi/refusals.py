"""What `test_failures.py` runs on ranks: errors that every rank sees, so that a script can catch them and go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from autovaruna import AutoVaruna, get_rank
from tests.mpi import failures
from tests.mpi.failures import FAILING, Net, batch, fail
from tests.session.training import trace_shared

wrap = partial(failures.wrap, load_deployment=False)  # one in the folder that tests start in would spare the measuring
Refusal = tuple[str, str]
"""The kind of an error, and its message."""


class Scaled(Net):
    """Has a keyword that is no tensor."""

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, y) * scale


class BadTrace(Net):
    """Raises on rank 1, while it is traced."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if get_rank() == 1:
            fail()
        return super().forward(x, y)


def call(model: nn.Module | None = None, weigh: Any = None, **settings: Any) -> None:
    """Wraps a model and calls it once."""
    wrap(model, micro_batch_weight=weigh, **settings)[0](*batch())


def on_rank_1(value: Any, other: Any) -> Any:
    return value if get_rank() == 1 else other


def trapped() -> None:
    """Calls a model with an operation that fails where it is measured."""
    FAILING.update(on_rank_1(["forward"], []))
    try:
        call()
    finally:
        FAILING.clear()


def optimizer_of_wrong_type() -> None:
    model = Net()
    AutoVaruna(model, list(model.parameters()), load_deployment=False)(*batch())


BEFORE: dict[str, Callable[[], object]] = {
    "models_differ": lambda: call(Net(on_rank_1(16, 8))),
    "settings_differ": lambda: call(num_micro_batches=on_rank_1(8, 4)),
    "trace_fails": lambda: call(BadTrace()),
    "measuring_fails": trapped,
    "too_many_stages": lambda: call(cuts=[], stage_ranks=[], num_stages=40),
    "too_few_micro_batches": lambda: call(num_micro_batches=1),
    "weight_fails": lambda: call(weigh=lambda batch: on_rank_1(fail, lambda: 1.0)()),
    "weight_is_negative": lambda: call(weigh=lambda batch: -1.0),
    "weights_are_zero": lambda: call(weigh=lambda batch: 0.0),
    "optimizer_of_wrong_type": optimizer_of_wrong_type,
    "replaced_before": lambda: functional_call(wrap()[0], {"first.weight": torch.zeros(8, 4)}, batch()),
    "replicated_sizes_differ": lambda: wrap(inputs="replicated")[0](*batch(on_rank_1(6, 4))),
}
"""Calls of models that have no plan yet."""


def differing(change: Callable[[Tensor], Tensor]) -> Callable[[AutoVaruna], object]:
    """Returns a call to which rank 1 passes something else."""
    return lambda model: model(on_rank_1(change, lambda x: x)(batch()[0]), batch()[1])


def modes_differ(model: AutoVaruna) -> None:
    model.train(on_rank_1(False, True))
    try:
        model(*batch())
    finally:
        model.train()


def gradients_differ(model: AutoVaruna) -> None:
    with torch.set_grad_enabled(on_rank_1(False, True)):
        model(*batch())


def backward_twice(model: AutoVaruna) -> None:
    loss = model(*batch())
    loss.backward()
    loss.backward()


def step_and_call(act: Callable[[Tensor], object]) -> Callable[[AutoVaruna], object]:
    """Returns a step whose loss is used in another way on rank 1, and the call after it."""

    def story(model: AutoVaruna) -> None:
        loss = model(*batch())
        act(loss) if get_rank() == 1 else loss.backward()
        model(*batch())

    return story


AFTER: dict[str, Callable[[AutoVaruna], object]] = {
    "no_backward_on_one": step_and_call(lambda loss: None),
    "gradients_of_loss_differ": step_and_call(lambda loss: (2.0 * loss).backward()),
}
"""What is done to a model that cannot go on after it."""


DURING: dict[str, Callable[[AutoVaruna], object]] = {
    "shapes_differ": differing(lambda x: x[:, :3]),
    "constants_differ": lambda model: model(*batch(), scale=on_rank_1(2.0, 1.0)),
    "modes_differ": modes_differ,
    "grad_modes_differ": gradients_differ,
    "no_batch": lambda model: model(),
    "no_batch_on_one": lambda model: model(*on_rank_1((), batch())),
    "batches_differ": lambda model: model(batch(3)[0], batch(4)[1]),
    "all_empty": lambda model: model(*batch(0)),
    "shape_does_not_fit": lambda model: model(batch()[0][:, :3], batch()[1]),
    "backward_twice": backward_twice,
    "calls_differ": lambda model: model.state_dict() if get_rank() == 1 else model(*batch()),
    "moved": lambda model: model.to(torch.float64),
    "assigned": lambda model: model.load_state_dict({}, strict=False, assign=True),
    "replaced": lambda model: functional_call(model, {"first.weight": torch.zeros(8, 4)}, batch()),
}
"""What is done to a model that is training."""


def refusal(act: Callable[[], object]) -> Refusal:
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@trace_shared("refusals")
def refusals() -> dict[str, Refusal]:
    """Returns what each story raised on this rank, and that training goes on after them; equal models share a trace."""
    found = {name: refusal(act) for name, act in BEFORE.items()}
    model, optimizer = wrap(Scaled())
    for name, act in {"": one_step, **DURING}.items():
        found[name] = refusal(partial(act, model))
        found[f"after {name}"] = refusal(partial(one_step, model))
        optimizer.step()
    for name, act in AFTER.items():
        found[name] = refusal(partial(act, wrap()[0]))
    return found


def one_step(model: AutoVaruna) -> None:
    loss = model(*batch())
    loss.backward()
    assert torch.isfinite(loss)
