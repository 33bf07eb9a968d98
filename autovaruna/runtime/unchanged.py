"""Refuses a backward through weights that have changed since the call, as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from autovaruna.errors import OrderError
from autovaruna.runtime.publish import Finish, Gradients


def while_unchanged(finish: Finish, held: Mapping[str, Tensor], saved: Collection[str]) -> Finish:
    """Returns `finish`, for as long as nothing changes some weights in place.

    Args:
        finish: Turns the gradients of what a call returns into those of its sources.
        held: The parameters of this rank by name.
        saved: Names of those whose numbers autograd saves.
    """
    weights = {name: held[name] for name in saved if name in held}
    versions = {name: weight._version for name, weight in weights.items()}

    def checked(gradients: Gradients, is_kept: bool) -> Gradients:
        changed = [name for name, weight in weights.items() if weight._version != versions[name]]
        if changed:
            raise OrderError(
                f"A backward after weights have changed: got other numbers in {sorted(changed)[0]} than the call of "
                "the model had, whose gradients need those (an optimizer has stepped, say). Expected all backwards of "
                "a call before that; go backward first, or call the model again."
            )
        return finish(gradients, is_kept)

    return checked
