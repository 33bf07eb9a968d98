"""Defines `RemoteTensor`: a parameter of a model that is split, on a rank that does not hold its numbers.

It stands in the model in the place of the parameter, so that all ranks list the same parameters. Its shape, dtype,
device and flags are the parameter's. What is computed from such tensors alone is again remote, and what is written to
one is left to the ranks that hold it, where the same script does the same: so clamping all weights, and a step of any
optimizer, are right on every rank. Whatever would join its numbers with those of this rank raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autovaruna._torch import DisableTorchFunctionSubclass, pytree, swap_tensors
from autovaruna.errors import InputError

PLAIN = DisableTorchFunctionSubclass
_BY_SHAPE_ALONE = frozenset({"view_as", "expand_as", "reshape_as", "is_same_size"})
_MOVES = frozenset({"to", "cpu", "cuda", "type", "type_as"})
_FLAGS = frozenset(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_meta", "is_leaf", "dtype", "shape"))
"""Attributes that are the tensor's own; every step reads some of every parameter."""


@dataclass(frozen=True)
class Home:
    """Where the numbers of a tensor are.

    Attributes:
        name: The parameter.
        ranks: The ranks that hold it.
        rank: This rank, which does not.
        device: Where the numbers would be on this rank.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    device: torch.device


class RemoteTensor(Tensor):
    """A tensor whose numbers other ranks hold; see the head of this file. Its memory is on ``meta``."""

    home: Home
    gradient: RemoteTensor | None = None
    """The last one of a parameter: it has no numbers, so the next step's is the same."""
    _is_param: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Does what PyTorch asks for without numbers, or raises an `InputError` that says whose numbers they are."""
        if func in _FLAGS:
            with PLAIN():
                return func(*args)
        if func is Tensor.detach:  # a state_dict detaches all parameters
            with PLAIN():
                return _wrapped(func(*args), args[0].home)
        return _Operation(func, args, dict(kwargs or {})).run()


def remote_like(tensor: Tensor, home: Home) -> Tensor:
    """Returns a stand-in for a tensor, a parameter for a parameter."""
    made = _wrapped(tensor.detach().to("meta"), home)
    if isinstance(tensor, nn.Parameter):
        made._is_param = True
        made.requires_grad_(tensor.requires_grad)
    return made


def note_gradients(parameters: Sequence[RemoteTensor]) -> None:
    """Gives those of the parameters that need a gradient one that is elsewhere, too."""
    with PLAIN():  # a step looks at every parameter, and as a rule finds that zero_grad() has taken all gradients
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                known = parameter.gradient
                if known is None or known.dtype is not parameter.dtype or known.shape != parameter.shape:
                    known = parameter.gradient = _wrapped(torch.empty_like(parameter.detach()), parameter.home)
                parameter.grad = known


def _wrapped(tensor: Tensor, home: Home) -> RemoteTensor:
    with PLAIN():
        made = tensor.as_subclass(RemoteTensor)
    made.home = home
    return made


class _Operation:
    """One operation of PyTorch that has been asked for with a tensor that is elsewhere."""

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._name: str = getattr(func, "__name__", str(func))
        self._tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._home = next(each for each in self._tensors if isinstance(each, RemoteTensor)).home

    def run(self) -> Any:
        """Returns what the operation returns."""
        if self._name in ("__get__", "__set__"):
            return self._attribute(getattr(getattr(self._func, "__self__", None), "__name__", ""))
        if self._func is torch.autograd.grad:
            return self._gradients()
        special = getattr(self, f"_on{self._name}", None)
        if special is not None:
            return special()
        if self._name.startswith(("_foreach_", "_fused_")):
            return self._for_each()
        if self._name in _MOVES:
            return self._move()
        if isinstance(self._first, RemoteTensor):
            return self._without_numbers()
        if self._name in _BY_SHAPE_ALONE:
            with PLAIN():
                return self._func(*self._args, **self._kwargs)
        self.refuse()

    @property
    def _first(self) -> Any:
        """What the operation is of: a list is elsewhere if all its tensors are."""
        first = self._args[0] if self._args else next(iter(self._kwargs.values()))
        if isinstance(first, list | tuple):
            here = [each for each in first if isinstance(each, Tensor) and not isinstance(each, RemoteTensor)]
            return here[0] if here else next((each for each in first if isinstance(each, Tensor)), self._tensors[0])
        return first

    def _without_numbers(self) -> Any:
        """Runs the operation on shapes alone; what is written is written where the numbers are."""
        if any(not isinstance(each, RemoteTensor) for each in self._tensors if each is self._kwargs.get("out")):
            self.refuse()
        args, kwargs = pytree.tree_map_only(Tensor, _on_meta, (self._args, self._kwargs))
        try:
            with PLAIN():
                found = self._func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:  # what meta has no kernel for is one
            if "meta" in str(error).lower() or self._name == "__format__":
                self.refuse(error)
            raise
        return pytree.tree_map_only(Tensor, self._back, found)

    def _back(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, RemoteTensor) else _wrapped(tensor, self._home)

    def _attribute(self, name: str) -> Any:
        """Reads or sets an attribute of a tensor."""
        owner, *value = self._args
        if name == "device":
            return self._home.device
        if name in ("is_cuda", "is_cpu"):
            return self._home.device.type == name.removeprefix("is_")
        if self._name == "__get__":
            return self._without_numbers()
        if not isinstance(owner, RemoteTensor):
            self.refuse()
        if name in ("data", "grad") and isinstance(value[0], Tensor):
            value = [remote_like(value[0], self._home)]
            if name == "data":
                return None
        with PLAIN():
            return self._func(owner, *value)

    def _move(self) -> Any:
        """Casts; a tensor that is elsewhere is on the device that this rank computes on, whatever it is moved to."""
        owner, *rest = self._args
        if not isinstance(owner, RemoteTensor):
            target = next(each for each in self._tensors if isinstance(each, RemoteTensor))
            return owner.to(target.home.device, target.dtype)
        dtype = self._kwargs.get("dtype") or next((each for each in rest if isinstance(each, torch.dtype)), None)
        dtype = dtype or next((each.dtype for each in rest if isinstance(each, Tensor)), owner.dtype)
        with PLAIN():
            return owner if dtype == owner.dtype else _wrapped(owner.to(dtype), self._home)

    def _for_each(self) -> Any:
        """Runs an operation on lists for those places whose tensors are here; the others are elsewhere."""
        lists = [each for each in (*self._args, *self._kwargs.values()) if _has_tensors(each)]
        away = [any(isinstance(each, RemoteTensor) for each in place) for place in zip(*lists, strict=False)]
        if any(not isinstance(one, RemoteTensor) and is_away for one, is_away in zip(lists[0], away, strict=True)):
            self.refuse()
        here = self._call_for([place for place, is_away in enumerate(away) if not is_away], len(away))
        if self._name.endswith("_") or here is None:
            return None
        there = self._call_for([place for place, is_away in enumerate(away) if is_away], len(away))
        found, rest = iter(here), iter(there)
        return [next(rest) if is_away else next(found) for is_away in away]

    def _call_for(self, places: Sequence[int], length: int) -> Any:
        """Calls the operation for some places of its lists."""

        def pick(value: Any) -> Any:
            is_list = isinstance(value, list | tuple) and len(value) == length
            return [value[place] for place in places] if is_list else value

        if not places:
            return []
        args, kwargs = list(map(pick, self._args)), {name: pick(each) for name, each in self._kwargs.items()}
        if any(isinstance(each, RemoteTensor) for each in pytree.tree_leaves((args, kwargs))):
            return _Operation(self._func, args, kwargs)._without_numbers()
        return self._func(*args, **kwargs)

    def _gradients(self) -> Any:
        """Runs ``torch.autograd.grad`` for the inputs that are here."""
        names = ["outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused"]
        given = dict(zip(names, self._args, strict=False)) | self._kwargs
        inputs = given["inputs"]
        if any(isinstance(each, RemoteTensor) for each in pytree.tree_leaves(given["outputs"])):
            self.refuse()
        here = [each for each in inputs if not isinstance(each, RemoteTensor)]
        grad: Any = torch.autograd.grad
        found = iter(grad(**(given | {"inputs": here})) if here else ())
        return tuple(torch.empty_like(each) if isinstance(each, RemoteTensor) else next(found) for each in inputs)

    def _on__repr__(self) -> str:
        owner, home = self._first, self._home
        return f"(elsewhere: {home.name}, shape {tuple(owner.shape)}, {owner.dtype}, held by ranks {list(home.ranks)})"

    _on__format__ = _on__repr__

    def _on__deepcopy__(self) -> Tensor:
        owner, memo = self._args
        if id(owner) not in memo:
            made = remote_like(owner, self._home)
            made.__dict__.update({name: each for name, each in copy.copy(owner.__dict__).items() if name != "grad"})
            made.requires_grad_(owner.requires_grad)
            memo[id(owner)] = made
        copied: Tensor = memo[id(owner)]
        return copied

    def _on__reduce_ex__(self) -> NoReturn:
        self.refuse()

    _onbackward = _ondata_ptr = _onstorage = _onuntyped_storage = _onequal = _onallclose = _on__reduce_ex__

    def refuse(self, cause: Exception | None = None) -> NoReturn:
        """Raises an error that says whose numbers are asked for."""
        home = self._home
        raise InputError(
            f"Rank {home.rank} does not hold {home.name}, for the model has been split: got {self._name}() of its "
            f"numbers, which are on ranks {list(home.ranks)}. Expected calls of the wrapped model alone, model(...), "
            "not of its submodules or other methods; for averages of weights, copy.deepcopy(model) of the wrapper, "
            "which is split alike; for whole weights, model.state_dict() on every rank; for norms of gradients, "
            "model.clip_grad_norm_(); for penalties on weights, that the model's forward adds them to its loss. What "
            "is done to one parameter after the other may leave out those with is_meta."
        ) from cause


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, RemoteTensor) or tensor.is_meta else tensor.detach().to("meta")


def _has_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value)


def release(parameter: nn.Parameter, home: Home) -> Tensor:
    """Returns the parameter, which is `RemoteTensor` now and has no numbers and no gradient here.

    Lists that a script has made of parameters before, and optimizers, then hold what the model holds. Where PyTorch
    itself keeps the parameter, in the graph of a backward that may still come, a stand-in of its own is returned.
    """
    made = remote_like(parameter, home)
    try:
        swap_tensors(parameter, made)
        parameter.__class__ = RemoteTensor  # type: ignore[assignment]
    except RuntimeError:  # PyTorch keeps it
        return made
    except TypeError:  # a class of its own with another layout
        swap_tensors(parameter, made)
        return made
    parameter.__dict__.update(home=home, _is_param=True)
    return parameter
