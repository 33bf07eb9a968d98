"""Lets PyTorch's own clipping see the gradients of all ranks, where a model is split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.runtime.optimizers.norm import told_by_all, total_of
from autovaruna.runtime.weights.elsewhere import Elsewhere
from autovaruna.runtime.weights.split_models import SplitModel, split_models

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
            parameters = [each for each in listed if not isinstance(each.grad, Elsewhere)]  # others scale those
        return plain(parameters, max_norm, total_norm, *args, **options)

    module._clip_grads_with_norm_ = noting


def _model_of(tensors: Sequence[Tensor]) -> SplitModel | None:
    """Returns the split model that tensors are gradients of; None: of none, or something else is elsewhere."""
    for model in split_models():
        names = model.names_of_gradients()
        if any(id(each) in names for each in tensors):
            is_known = all(id(each) in names for each in tensors if isinstance(each, Elsewhere))
            return model if is_known else None
    return None


def _total(tensors: Sequence[Tensor], model: SplitModel, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Returns the norm of all gradients, in the order of rank 0's list. Collective."""
    own = _norms(tensors, model.names_of_gradients(), norm_type)
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
    rank, first = model.world.rank, model.placement.ranks_of
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


def _norms(tensors: Sequence[Tensor], names: dict[int, str], norm_type: float) -> list[_Norm]:
    """Returns the norms of tensors, those included that this rank does not know."""
    seen: Counter[str] = Counter()
    norms = []
    for place, each in enumerate(tensors):
        parameter = names.get(id(each))
        name = parameter or f"tensor {place}"
        seen[name] += 1
        norm = None if isinstance(each, Elsewhere) else torch.linalg.vector_norm(each, norm_type)
        number, dtype = (None, each.dtype) if norm is None else (norm.item(), norm.dtype)
        again = f", again ({seen[name]})" if seen[name] > 1 else ""
        norms.append(_Norm(name + again, parameter, number, dtype))
    return norms
