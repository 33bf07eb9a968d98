"""Clips gradients by the norm of all of them: the same number on every rank, for every plan.

`clip_grad_norm` is the wrapper's own; with `CLIPPING`, PyTorch's own clipping sees the gradients of all ranks.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from weakref import WeakSet

import torch
from torch import Tensor

from autovaruna._torch import foreach_mul_, foreach_norm
from autovaruna.errors import RankError
from autovaruna.interception.gradients import join_norms
from autovaruna.interception.installed import ProcessPiece
from autovaruna.ranks.exchange import ALIKE, differences
from autovaruna.ranks.world import World
from autovaruna.runtime.metrics import Metrics
from autovaruna.runtime.remote_parameter import RemoteTensor
from autovaruna.runtime.weights import SplitModel, split_models

Norm = tuple[float, torch.dtype]
_NO_NORM = -1.0
"""What a rank reports of a tensor that is elsewhere."""

METRICS: WeakSet[Metrics] = WeakSet()
"""Those of all models, which measure the norm of gradients before these are clipped."""


def clip_grad_norm(model: SplitModel, max_norm: float, norm_type: float, error_if_nonfinite: bool, what: str) -> Tensor:
    """Clips as ``torch.nn.utils.clip_grad_norm_`` does, over the parameters of all ranks. Collective.

    A parameter counts once, whoever holds it. The norms of single parameters are put together in the order of the
    model's own list, so that no plan changes the sum, which is returned. Errors are those of `total_norm`.
    """
    gradients = model.gradients()
    names = {id(each): name for name, each in gradients.items()}
    options = {"max_norm": f"{float(max_norm):g}", "norm_type": f"{float(norm_type):g}"}
    total = total_norm(list(gradients.values()), names, model, norm_type, error_if_nonfinite, options, what)
    own = [each for each in gradients.values() if not isinstance(each, RemoteTensor)]
    if own:
        foreach_mul_(own, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


@torch.no_grad()
def total_norm(
    tensors: Sequence[Tensor],
    names: Mapping[int, str],
    model: SplitModel,
    norm_type: float,
    error_if_nonfinite: bool,
    options: Mapping[str, str],
    what: str,
) -> Tensor:
    """Returns the norm of tensors, of which each rank knows some, in the order of rank 0's list. Collective.

    As a rule all ranks list the same, and each norm is reported by one rank.

    Args:
        names: The parameter that a tensor is, or is the gradient of, by identity; others count on every rank.
        options: What the ranks must ask with alike, in words.
        what: What to call it in errors.

    Raises:
        RankError: the ranks ask with other options, or one has not listed a tensor that another has.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    listed = _listed(tensors, names)
    own = _norms({name: each for name, each in listed.items() if not isinstance(each, RemoteTensor)}, norm_type)
    reporters = _reporters(listed, names, model)
    reported = [own[name][0] if name in own else _NO_NORM for name, rank in reporters if rank == model.world.rank]
    alike = repr((list(options.items()), list(listed))).encode()
    agreed = model.world.exchange(what, alike=alike, block=array("d", reported).tobytes())
    if agreed.differs(ALIKE):
        order, numbers = _compare_lists(list(listed), own, options, model.world, what)
    else:
        order, rows = list(listed), list(map(iter, agreed.numbers()))
        pairs = [(name, next(rows[rank])) for name, rank in reporters]
        known = {name: number for name, number in reversed(pairs) if number != _NO_NORM}
        numbers = {name: (number, listed[name].dtype.to_real()) for name, number in known.items()}
    found = [numbers[name] for name in order if name in numbers] or [(0.0, torch.float32)]
    dtype = reduce(torch.promote_types, {dtype for _, dtype in found})
    device = tensors[0].device if tensors else None
    norms = torch.tensor([number for number, _ in found], dtype=torch.float64, device=device).to(dtype)
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is {total.item()}, non-finite, so they cannot be clipped. "
            "Pass error_if_nonfinite=False to clip nevertheless."
        )
    return total


def _reporters(listed: Mapping[str, Tensor], names: Mapping[int, str], model: SplitModel) -> Sequence[tuple[str, int]]:
    """Returns each tensor with the rank that reports its norm: one of a parameter's, every one of another tensor."""
    pairs = []
    for name, each in listed.items():
        parameter = names.get(id(each))
        ranks = model.placement.steppers_of(parameter)[:1] if parameter is not None else range(model.world.num_ranks)
        pairs += [(name, rank) for rank in ranks]
    return pairs


def _compare_lists(
    listed: Sequence[str], own: Mapping[str, Norm], options: Mapping[str, str], world: World, what: str
) -> tuple[Sequence[str], Mapping[str, Norm]]:
    """Returns the list of rank 0, and the norms that any rank has; raises as `total_norm`. Collective."""
    if words := differences(world.gather_objects(options, what)):
        raise RankError(
            f"The ranks ask for different norms of gradients: {words}. Expected the same options on every rank."
        )
    of_ranks = world.gather_objects((listed, own), "comparing lists of gradients")
    known = {name: norm for _, of_rank in reversed(of_ranks) for name, norm in of_rank.items()}
    for rank, (names, _) in enumerate(of_ranks):
        if missing := known.keys() - set(names):
            raise RankError(
                f"The ranks ask for the norm of different gradients: got a list on rank {rank} without that of "
                f"{', '.join(sorted(missing)[:3])}, which another rank has. Expected the same list on every rank, with "
                "those that are elsewhere (is_meta): parameters(), or the optimizer's groups."
            )
    return of_ranks[0][0], known


def _listed(tensors: Sequence[Tensor], names: Mapping[int, str]) -> dict[str, Tensor]:
    """Returns tensors by parameter, or by place; one that is listed again has a name of its own."""
    seen, listed = Counter[str](), dict[str, Tensor]()
    for place, each in enumerate(tensors):
        name = names.get(id(each), f"tensor {place}")
        seen[name] += 1
        listed[name if seen[name] == 1 else f"{name}, again ({seen[name]})"] = each
    return listed


def _norms(tensors: Mapping[str, Tensor], norm_type: float) -> dict[str, Norm]:
    """Returns the norm of each tensor and its dtype; all of a device and dtype are computed at once, as torch does."""
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, each in tensors.items():
        alike.setdefault((each.device, each.dtype), []).append(name)
    norms: dict[str, Tensor] = {}
    for names in alike.values():
        norms |= zip(names, foreach_norm([tensors[name] for name in names], norm_type), strict=True)
    numbers = torch.stack([norm.double() for norm in norms.values()]).tolist() if norms else []
    return {name: (number, norms[name].dtype) for name, number in zip(norms, numbers, strict=True)}


class JoinedNorm:
    """The gradients of a split model, as PyTorch's own clipping asks for their norm."""

    def __init__(self, model: SplitModel) -> None:
        self._model = model

    def norm(self, tensors: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
        model = self._model
        names = {id(each): name for name, each in model.gradients().items()}
        limit = f"{model.limits[0]:g}" if model.limits else "none"
        options = {"norm_type": f"{norm_type:g}", "max_norm of the last clipping": limit}
        return total_norm(tensors, names, model, norm_type, error_if_nonfinite, options, "the norm of gradients")

    def record_limit(self, max_norm: float) -> None:
        self._model.limits[:] = [max_norm]

    def here(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [each for each in parameters if not isinstance(each.grad, RemoteTensor)]


def _model_of(tensors: Sequence[Tensor]) -> JoinedNorm | None:
    """Returns the split model that tensors are gradients of; None: of none, or something else is elsewhere."""
    for model in split_models():
        known = set(map(id, model.gradients().values()))
        if any(id(each) in known for each in tensors):
            is_known = all(id(each) in known for each in tensors if isinstance(each, RemoteTensor))
            return JoinedNorm(model) if is_known else None
    return None


def _before_clipping(parameters: Sequence[Tensor]) -> None:
    for each in list(METRICS):
        each.before_clipping(parameters)


CLIPPING = ProcessPiece(partial(join_norms, _model_of, _before_clipping))
"""PyTorch's own clipping, for gradients of models that are split, and for `METRICS`."""
