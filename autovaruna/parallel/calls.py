"""Describes a call of the model on all ranks: they must agree on everything but the number of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.graph.call import CallSpec
from autovaruna.runtime.world import World


@dataclass(frozen=True)
class SharedCall:
    """One call of the model, of which every rank has its own samples.

    Attributes:
        call: the description on this rank.
        tensors: this rank's tensors, in order.
        sizes: samples of each rank's mini-batch.
        number: how many calls there were before.
    """

    call: CallSpec
    tensors: Sequence[Tensor]
    sizes: tuple[int, ...]
    number: int

    @property
    def key(self) -> str:
        """Digest that is equal for calls that one trace serves."""
        return self.call.key()


def share_call(call: CallSpec, tensors: Sequence[Tensor], number: int, is_replicated: bool, world: World) -> SharedCall:
    """Tells all ranks of this rank's call and hears of theirs. Collective.

    Raises:
        RankError: the ranks' calls do not fit together; says how they differ.
    """
    reports = world.gather_objects((call.key(), call.batch_size, _summary(call)), f"call {number + 1} of the model")
    for rank, (key, _, summary) in enumerate(reports):
        if key != reports[0][0]:
            raise RankError(
                f"The ranks call the model with inputs that do not fit: rank 0 passes {_print(reports[0][2])}, "
                f"rank {rank} passes {_print(summary)}{_hidden_difference(reports[0][2], summary)}. Expected the same "
                "names, dtypes, constants and shapes on every rank, but for the size of the batch."
            )
    sizes = tuple(size for _, size, _ in reports)
    if is_replicated and len(set(sizes)) > 1:
        raise RankError(
            f"inputs='replicated', but the ranks pass batches of {list(sizes)} samples. Expected the same batch on "
            "every rank; pass inputs='per_rank' if each has samples of its own."
        )
    return SharedCall(call, tensors, sizes, number)


def _summary(call: CallSpec) -> dict[str, str]:
    return {spec.name: f"{tuple(spec.shape)} {spec.dtype}" for spec in call.inputs}


def _print(summary: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in summary.items())


def _hidden_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    if one != other:
        return ""
    return " (they differ in constants, in train() and eval(), in grad mode or in autocast)"
