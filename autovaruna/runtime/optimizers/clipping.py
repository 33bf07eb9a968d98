"""Clips gradients by the norm of all of them: the same number on every rank, for every plan.

`clip_grad_norm` is the wrapper's own; `join_norms` lets PyTorch's own clipping see the gradients of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from autovaruna._torch import foreach_mul_, foreach_norm
from autovaruna.errors import RankError
from autovaruna.runtime.remote_parameter import RemoteTensor
from autovaruna.runtime.weights import OwnedState, Placement, SplitModel, split_models
from autovaruna.runtime.world import World, differences

Norms = TypeVar("Norms")


def clip_grad_norm(
    state: OwnedState,
    placement: Placement,
    names: Sequence[str],
    world: World,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    what: str,
) -> Tensor:
    """Clips as ``torch.nn.utils.clip_grad_norm_`` does, over the parameters of all ranks. Collective.

    A parameter counts once, whoever holds it. The norms of single parameters are put together in the order of the
    model's own list, so that no plan changes the sum.

    Args:
        names: First names of all parameters, in the model's order.
        max_norm, norm_type, error_if_nonfinite: As in PyTorch; the same on every rank.
        what: What to call it in errors.

    Returns:
        The norm before clipping.

    Raises:
        RankError: the ranks clip to other norms.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    here = {name: parameter for name, parameter in state.parameters().items() if not parameter.is_meta}
    gradients = {name: parameter.grad for name, parameter in here.items() if parameter.grad is not None}
    own = {name: each for name, each in gradients.items() if not isinstance(each, RemoteTensor)}
    options = {"max_norm": f"{float(max_norm):g}", "norm_type": f"{float(norm_type):g}"}
    norms = norms_of_all(own, placement, names, world, norm_type, options, what)
    total = total_of(norms, norm_type, error_if_nonfinite)
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if own:
        foreach_mul_(list(own.values()), coefficient)
    return total


def norms_of_all(
    own: Mapping[str, Tensor],
    placement: Placement,
    names: Sequence[str],
    world: World,
    norm_type: float,
    options: Mapping[str, str],
    what: str,
) -> Tensor:
    """Returns a norm for each parameter of the model, shape (parameters,), the same on every rank. Collective.

    Args:
        own: This rank's parameters, or their gradients, by first name.
        names: First names of all parameters, in the model's order.
        norm_type: The order of the norm.
        options: What the ranks must ask with alike, in words.
        what: What to call it in errors.
    """
    device = next((each.device for each in own.values()), torch.device("cpu"))
    parts = told_by_all(_own_norms(own, placement, names, world.rank, norm_type), options, world, what)
    known = {place: norm for of_rank in parts for place, norm in of_rank.items()}
    norms = torch.tensor([known.get(place, 0.0) for place in range(len(names))], dtype=torch.float64, device=device)
    return norms.to(torch.float32 if not own else next(iter(own.values())).dtype)


def told_by_all(norms: Norms, options: Mapping[str, str], world: World, what: str) -> list[Norms]:
    """Returns the norms that each rank tells. Collective; a message would not say if a rank is elsewhere.

    Raises:
        RankError: the ranks ask with other options.
    """
    parts = world.gather_objects((norms, options), what)
    if found := differences([of_rank for _, of_rank in parts]):
        raise RankError(
            f"The ranks ask for different norms of gradients: {found}. Expected the same options on every rank."
        )
    return [of_rank for of_rank, _ in parts]


def total_of(norms: Tensor, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Returns the norm of norms.

    Raises:
        RuntimeError: it is not finite and `error_if_nonfinite` is set.
    """
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is {total.item()}, non-finite, so they cannot be clipped. "
            "Pass error_if_nonfinite=False to clip nevertheless."
        )
    return total


def _own_norms(
    own: Mapping[str, Tensor], placement: Placement, names: Sequence[str], rank: int, norm_type: float
) -> dict[int, float]:
    """Returns the norms of what this rank is the first to step over, by place in the list of names."""
    places = [place for place, name in enumerate(names) if name in own and placement.steppers_of(name)[0] == rank]
    return dict(zip(places, _numbers(_norms([own[names[place]] for place in places], norm_type)), strict=True))


def _norms(tensors: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Returns the norm of each tensor, shape (), all of a device and dtype at once, as torch's own clipping does."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, each in enumerate(tensors):
        alike.setdefault((each.device, each.dtype), []).append(place)
    found: dict[int, Tensor] = {}
    for places in alike.values():
        found |= zip(places, foreach_norm([tensors[place] for place in places], norm_type), strict=True)
    return [found[place] for place in range(len(tensors))]


def _numbers(norms: Sequence[Tensor]) -> list[float]:
    """Returns what tensors of shape () hold, once the device has computed all of it."""
    return torch.stack([norm.double() for norm in norms]).tolist() if norms else []


_OF_MODEL = "_autovaruna_model"
"""Attribute of the norm of a split model's gradients."""


@dataclass(frozen=True)
class _Norm:
    """The norm of one tensor, as far as a rank knows it.

    Attributes:
        name: The parameter whose gradient it is, or its place among the others; listed again, it has a name of its own.
        parameter: The parameter; None: it is of none.
        number: None: the tensor is elsewhere.
        dtype: What the norm was computed in.
    """

    name: str
    parameter: str | None
    number: float | None
    dtype: torch.dtype


def join_norms() -> None:
    """Lets ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` join the norms of gradients of a split model.

    That is collective then: every rank asks for the norm of the same gradients, of which some are elsewhere.
    """
    module: Any = torch.nn.utils.clip_grad
    plain = getattr(module, "_get_total_norm", None)
    if plain is None or hasattr(plain, "joins_norms"):
        return

    @wraps(plain)
    def joined(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, *args: Any, **options: Any
    ) -> Any:
        found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        model = _model_of(found)
        if model is None:
            return plain(found, norm_type, error_if_nonfinite, *args, **options)
        with torch.no_grad():
            total = _total(found, model, float(norm_type), error_if_nonfinite)
        setattr(total, _OF_MODEL, model)
        return total

    joined.joins_norms = True  # type: ignore[attr-defined]
    module._get_total_norm = joined
    _note_limits(module)
    if hasattr(torch.nn.utils, "get_total_norm"):
        torch.nn.utils.get_total_norm = joined


def _note_limits(module: Any) -> None:
    """Notes what gradients are clipped to, which ranks compare when they ask for their next norm."""
    plain = module._clip_grads_with_norm_

    @wraps(plain)
    def noting(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **options: Any) -> Any:
        model: SplitModel | None = getattr(total_norm, _OF_MODEL, None)
        if model is not None:
            model.limits[:] = [float(max_norm)]
            listed = [parameters] if isinstance(parameters, Tensor) else parameters
            parameters = [each for each in listed if not isinstance(each.grad, RemoteTensor)]  # others scale those
        return plain(parameters, max_norm, total_norm, *args, **options)

    module._clip_grads_with_norm_ = noting


def _model_of(tensors: Sequence[Tensor]) -> SplitModel | None:
    """Returns the split model that tensors are gradients of; None: of none, or something else is elsewhere."""
    for model in split_models():
        names = model.names_of_gradients()
        if any(id(each) in names for each in tensors):
            is_known = all(id(each) in names for each in tensors if isinstance(each, RemoteTensor))
            return model if is_known else None
    return None


def _total(tensors: Sequence[Tensor], model: SplitModel, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Returns the norm of all gradients, in the order of rank 0's list. Collective."""
    own = _norms_of_list(tensors, model.names_of_gradients(), norm_type)
    norms_of_all = [
        torch.tensor(each.number, dtype=each.dtype, device=tensors[0].device) for each in _joined(own, model, norm_type)
    ]
    return total_of(torch.stack(norms_of_all or [torch.zeros(())]), norm_type, error_if_nonfinite)


def _joined(own: list[_Norm], model: SplitModel, norm_type: float) -> list[_Norm]:
    """Returns the norms that any rank knows. Collective.

    As a rule all ranks list the same names, and each norm is told by one rank.

    Raises:
        RankError: the ranks ask for different norms, or have clipped to others; or one has not listed a gradient that
            another has.
    """
    rank, first = model.world.rank, model.placement.steppers_of
    told = [
        each for each in own if each.number is not None and (each.parameter is None or first(each.parameter)[0] == rank)
    ]
    listed = crc32("\n".join([each.name for each in own]).encode())
    limit = f"{model.limits[0]:g}" if model.limits else "none"
    options = {"norm_type": f"{norm_type:g}", "max_norm of the last clipping": limit}
    parts = told_by_all((listed, told), options, model.world, "the norm of gradients")
    of_ranks = [norms for _, norms in parts]
    names = [each.name for each in own]
    if len({digest for digest, _ in parts}) > 1:
        of_ranks = model.world.gather_objects(own, "comparing lists of gradients")
        names = [each.name for each in of_ranks[0]]
        _check_lists(of_ranks)
    known = {each.name: each for norms in reversed(of_ranks) for each in norms if each.number is not None}
    return [known[name] for name in names if name in known]


def _check_lists(of_ranks: Sequence[Sequence[_Norm]]) -> None:
    known = {each.name for norms in of_ranks for each in norms if each.number is not None}
    for rank, norms in enumerate(of_ranks):
        if missing := known - {each.name for each in norms}:
            raise RankError(
                f"The ranks ask for the norm of different gradients: got a list on rank {rank} without that of "
                f"{', '.join(sorted(missing)[:3])}, which another rank has. Expected the same list on every rank, with "
                "those that are elsewhere (is_meta): parameters(), or the optimizer's groups."
            )


def _norms_of_list(tensors: Sequence[Tensor], names: dict[int, str], norm_type: float) -> list[_Norm]:
    """Returns the norms of tensors, those included that this rank does not know."""
    seen: Counter[str] = Counter()
    here = [place for place, each in enumerate(tensors) if not isinstance(each, RemoteTensor)]
    own = _norms([tensors[place] for place in here], norm_type)
    known = {place: (number, norm.dtype) for place, number, norm in zip(here, _numbers(own), own, strict=True)}
    norms = []
    for place, each in enumerate(tensors):
        parameter = names.get(id(each))
        name = parameter or f"tensor {place}"
        seen[name] += 1
        number, dtype = known.get(place, (None, each.dtype))
        again = f", again ({seen[name]})" if seen[name] > 1 else ""
        norms.append(_Norm(name + again, parameter, number, dtype))
    return norms
