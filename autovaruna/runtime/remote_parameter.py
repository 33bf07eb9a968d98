"""Defines `RemoteTensor`: a parameter of a model that is split, on a rank that does not hold its numbers.

All ranks list the same parameters. What is computed from such tensors alone is again remote, and what is written to one
is left to the ranks that hold it, where the same script does the same; what is drawn for one is drawn on every rank. A
tensor of the script's own, of the same shape, may follow one parameter (an average of it, a moment): once numbers that
are elsewhere are written into it, it is elsewhere, too. What else would join numbers of several ranks raises.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autovaruna._torch import (
    DisableTorchFunctionSubclass,
    OpOverload,
    TorchDispatchMode,
    is_view,
    num_uses_of_storage,
    pytree,
    swap_tensors,
    without_memory,
)
from autovaruna.errors import InputError
from autovaruna.log import explanations

without_overrides = DisableTorchFunctionSubclass
_BY_SHAPE_ALONE = frozenset({"view_as", "expand_as", "reshape_as", "is_same_size"})
_MOVES = frozenset({"to", "cpu", "cuda", "type", "type_as"})
_EMPTY = frozenset({"new", "new_empty", "new_empty_strided", "empty_like"})
_KNOWN = frozenset(
    ("new_zeros", "new_ones", "new_full", "new_tensor", "zeros_like", "ones_like", "full_like")
    + ("rand_like", "randn_like", "randint_like")
)
"""Makes numbers that follow from no number of the tensor."""
_OF_NUMBERS = ("backward", "data_ptr", "storage", "untyped_storage", "equal", "allclose", "__reduce_ex__")
_DRAWS_BY_VALUE = frozenset(
    ("binomial", "multinomial", "poisson", "rrelu_with_noise", "rrelu_with_noise_")
    + ("_sample_dirichlet", "_standard_gamma")
)
"""Random operations that draw more or fewer numbers by those that they are given."""
_USES = 2
"""Of the memory of a tensor that nothing else shares: by the tensor, and by the one who counts."""
_FLAGS = frozenset(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_meta", "is_leaf", "dtype", "shape"))
"""Attributes that are the tensor's own; every step reads some of every parameter."""
_OF_META = (
    "The model has been split: what other ranks hold is on meta here (is_meta). Expected what is kept for each weight "
    "(copies, moments) to be made after the first call, or model.prepare(...); or a loop that leaves those out."
)
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Home:
    """Where the numbers of a tensor are: which parameter it is of, and the ranks that hold it; this rank does not."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    """Where the numbers would be on this rank."""
    shape: torch.Size


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
            if func == _IS_META and (caller := sys._getframe(1)).f_globals is vars(nn.init):
                code = caller.f_code  # a function of torch.nn.init, which leaves alone what is on meta
                arguments = {name: caller.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
                _initialise(getattr(nn.init, code.co_name), arguments)
            with without_overrides():
                return func(*args)
        if func is Tensor.detach:  # a state_dict detaches all parameters
            with without_overrides():
                return _wrapped(func(*args), args[0].home)
        return _Operation(func, args, dict(kwargs or {})).run()


def remote_like(tensor: Tensor, home: Home) -> Tensor:
    """Returns a stand-in for a tensor, a parameter for a parameter."""
    made = _wrapped(tensor.detach().to("meta"), home)
    vars(made).update({name: value for name, value in vars(tensor).items() if name not in vars(made)})
    if isinstance(tensor, nn.Parameter):
        made._is_param = True
        made.requires_grad_(tensor.requires_grad)
    return made


def show_remote_gradients(parameters: Sequence[RemoteTensor]) -> None:
    """Gives those of the parameters that need a gradient one that is elsewhere, too."""
    with (
        without_overrides()
    ):  # a step looks at every parameter, and as a rule finds that zero_grad() has taken all gradients
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                known = parameter.gradient
                if known is None or known.dtype is not parameter.dtype or known.shape != parameter.shape:
                    known = parameter.gradient = _wrapped(torch.empty_like(parameter.detach()), parameter.home)
                parameter.grad = known


def _wrapped(tensor: Tensor, home: Home) -> RemoteTensor:
    with without_overrides():
        made = tensor.as_subclass(RemoteTensor)
    made.home = home
    return made


class RemoteGradient(RemoteTensor):
    """The gradient, which another rank has, of a parameter that this rank holds, on its device and without memory."""

    @classmethod
    def of(cls, parameter: Tensor, home: Home) -> RemoteGradient:
        made: RemoteGradient = without_memory(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made.home = home
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _IS_META and isinstance(args[0], RemoteGradient):
            return True
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation on shapes alone."""

        def on_meta(tensor: Tensor) -> Tensor:
            if isinstance(tensor, RemoteGradient):
                return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            return tensor if tensor.is_meta else tensor.detach().to("meta")

        args, kwargs = pytree.tree_map_only(Tensor, on_meta, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws what operations on tensors without numbers would draw if they had them."""

    def __init__(self, operation: _Operation, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operation, self._device = operation, device

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags and any(each.is_meta for each in tensors):
            if func.overloadpacket.__name__ in _DRAWS_BY_VALUE:
                self._operation.refuse()
            device = self._device
            given, named = pytree.tree_map_only(
                Tensor, lambda each: _blank(each, device) if each.is_meta else each, (args, kwargs)
            )
            func(*given, **named)
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        return func(*args, **kwargs)


def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns zeros in the place of a tensor on ``meta``, of its strides, by which some kernels draw."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).zero_()


def _initialise(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Calls a function with zeros in the place of tensors that are elsewhere, for what it draws."""
    with without_overrides(), torch.no_grad():
        away = {name: each for name, each in arguments.items() if isinstance(each, RemoteTensor)}
        function(**{**arguments, **{name: _blank(each, each.home.device) for name, each in away.items()}})


class _Operation:
    """One operation of PyTorch that has been asked for with a tensor that is elsewhere."""

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._name: str = getattr(func, "__name__", str(func))
        self._tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._home = next(each for each in self._tensors if isinstance(each, RemoteTensor)).home

    def run(self) -> Any:
        if self._name in ("__get__", "__set__"):
            return self._attribute(getattr(getattr(self._func, "__self__", None), "__name__", ""))
        if self._func is torch.autograd.grad:
            return self._gradients()
        if getattr(self._func, "__module__", "") == nn.init.__name__:
            _initialise(self._func, self._kwargs)
            return self._first
        if self._name in _SPECIAL:
            return _SPECIAL[self._name](self)
        if self._name.startswith(("_foreach_", "_fused_")):
            return self._for_each()
        if self._name in _MOVES:
            return self._move()
        if self._name in _KNOWN or self._name in _EMPTY:
            return self._make()
        if isinstance(self._first, RemoteTensor):
            return self._without_numbers()
        if self._name in _BY_SHAPE_ALONE:
            with without_overrides():
                return self._func(*self._args, **self._kwargs)
        if not isinstance(self._first, Tensor) or not self._is_of_one_parameter():
            self.refuse()
        return self._follow(self._first) if self._writes() else self._without_numbers()

    def _make(self) -> Any:
        """Makes a tensor of numbers that this rank knows; one for the parameter's own is elsewhere, too."""
        if not isinstance(self._first, RemoteTensor):
            self.refuse()
        with without_overrides():
            if self._name in _EMPTY:
                like = self._func(*self._args, **(self._kwargs | {"device": "meta"} if self._name != "new" else {}))
                if like.shape == self._home.shape:
                    return _wrapped(like, self._home)
                return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._home.device)
            device = self._kwargs.get("device") or self._home.device
            return self._func(*self._args, **{**self._kwargs, "device": device})

    def _writes(self) -> bool:
        is_augmented = self._name.startswith("__i") and self._name != "__invert__"
        return is_augmented or self._name == "__setitem__" or (self._name[-1] == "_" != self._name[-2:-1])

    def _is_of_one_parameter(self) -> bool:
        """Whether all that is elsewhere belongs to one parameter, and what is here has its shape, or is one number."""
        homes = {(each.home.name, each.home.ranks) for each in self._tensors if isinstance(each, RemoteTensor)}
        here = [each for each in self._tensors if not isinstance(each, RemoteTensor)]
        shape = self._home.shape
        return len(homes) == 1 and all(
            each.shape == shape or (each is not self._first and not each.shape) for each in here
        )

    def _follow(self, owner: Tensor) -> Tensor:
        """Lets a tensor of the script's own, which is written by numbers that are elsewhere, be there from now on."""
        with without_overrides():
            is_own = type(owner) is Tensor and not (owner.requires_grad or is_view(owner))
            if not is_own or num_uses_of_storage(owner) > _USES:
                self.refuse()
            made = remote_like(owner, self._home)
            try:
                swap_tensors(owner, made)
            except RuntimeError as error:  # PyTorch keeps it
                self.refuse(error)
            owner.__class__ = RemoteTensor
        owner.__dict__.update(home=self._home)
        return owner

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
        is_attribute = self._name in ("__get__", "__set__")
        try:
            with without_overrides(), nullcontext() if is_attribute else _Draws(self, self._home.device):
                found = self._func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:  # what meta has no kernel for is one
            if "meta" in str(error).lower() or self._name == "__format__":
                self.refuse(error)
            raise
        return pytree.tree_map_only(
            Tensor, lambda each: each if isinstance(each, RemoteTensor) else _wrapped(each, self._home), found
        )

    def _attribute(self, name: str) -> Any:
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
        with without_overrides():
            return self._func(owner, *value)

    def _move(self) -> Any:
        """Casts; a tensor that is elsewhere is on the device that this rank computes on, whatever it is moved to."""
        owner, *rest = self._args
        if not isinstance(owner, RemoteTensor):
            target = next(each for each in self._tensors if isinstance(each, RemoteTensor))
            return owner.to(target.home.device, target.dtype)
        dtype = self._kwargs.get("dtype") or next((each for each in rest if isinstance(each, torch.dtype)), None)
        dtype = dtype or next((each.dtype for each in rest if isinstance(each, Tensor)), owner.dtype)
        with without_overrides():
            return owner if dtype == owner.dtype else _wrapped(owner.to(dtype), self._home)

    def _for_each(self) -> Any:
        """Runs an operation on lists for those places whose tensors are here; the others are elsewhere."""
        given = [each for each in (*self._args, *self._kwargs.values()) if isinstance(each, list | tuple)]
        lists = [each for each in given if any(isinstance(entry, Tensor) for entry in each)]
        places = list(zip(*lists, strict=False))
        away = [any(isinstance(each, RemoteTensor) for each in place) for place in places]
        joint = [_Operation(self._func, place, {}) for place, is_away in zip(places, away, strict=True) if is_away]
        for each in joint:
            if not isinstance(each._first, RemoteTensor):
                if not each._is_of_one_parameter():
                    each.refuse()
                if self._writes():
                    each._follow(each._first)
        here = self._call_for([place for place, is_away in enumerate(away) if not is_away], len(away))
        if self._name.endswith("_") or here is None:
            return None
        there = self._call_for([place for place, is_away in enumerate(away) if is_away], len(away))
        found, rest = iter(here), (_wrapped(made, each._home) for made, each in zip(there, joint, strict=True))
        return [next(rest) if is_away else next(found) for is_away in away]

    def _call_for(self, places: Sequence[int], length: int) -> Any:
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
        names = ["outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused"]
        given = dict(zip(names, self._args, strict=False)) | self._kwargs
        inputs = given["inputs"]
        if any(isinstance(each, RemoteTensor) for each in pytree.tree_leaves(given["outputs"])):
            self.refuse()
        here = [each for each in inputs if not isinstance(each, RemoteTensor)]
        grad: Any = torch.autograd.grad
        found = iter(grad(**(given | {"inputs": here})) if here else ())
        return tuple(torch.empty_like(each) if isinstance(each, RemoteTensor) else next(found) for each in inputs)

    def show(self) -> str:
        owner, home = self._first, self._home
        return f"(elsewhere: {home.name}, shape {tuple(owner.shape)}, {owner.dtype}, held by ranks {list(home.ranks)})"

    def deepcopy(self) -> Tensor:
        owner, memo = self._args
        if id(owner) not in memo:
            made = remote_like(owner, self._home)
            made.__dict__.update({name: each for name, each in copy.copy(owner.__dict__).items() if name != "grad"})
            made.requires_grad_(owner.requires_grad)
            memo[id(owner)] = made
        copied: Tensor = memo[id(owner)]
        return copied

    def refuse(self, cause: Exception | None = None) -> NoReturn:
        """Raises an error that says whose numbers are asked for."""
        home = self._home
        raise InputError(
            f"Rank {home.rank} does not hold {home.name}, for the model has been split: got {self._name}() of its "
            f"numbers, which are on ranks {list(home.ranks)}. Expected calls of the wrapped model alone, model(...) or "
            "model.method(x), with a tensor of the batch; of a module of it, model.call_part('encoder', x) on every "
            "rank; for averages of weights and target networks, copy.deepcopy(model) of the wrapper, which is split "
            "alike, or, of a part of the model by another (a momentum encoder), the same lines at the start of "
            "forward; for copies in another precision, those made after the first call; for whole weights, "
            "model.state_dict() on every rank; for the norm of all gradients, torch.nn.utils.get_total_norm(them); for "
            "the norm of all weights, model.parameter_norm(); for penalties on weights, the optimizer's weight_decay, "
            "or that the model's forward adds them to its loss. What is done to each parameter by its own numbers "
            "alone may leave out those with is_meta; a norm of the others would be another on each rank. Where a "
            "library does it, as in a callback, pass num_stages=1: each rank then has the whole model."
        ) from cause


_SPECIAL: dict[str, Callable[[_Operation], Any]] = {
    **dict.fromkeys(_OF_NUMBERS, _Operation.refuse),
    **dict.fromkeys(("__repr__", "__format__"), _Operation.show),
    "__deepcopy__": _Operation.deepcopy,
}
"""What is done for an operation by its name alone."""


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, RemoteTensor) or tensor.is_meta else tensor.detach().to("meta")


def release(parameter: nn.Parameter, home: Home) -> Tensor:
    """Returns the parameter, which is `RemoteTensor` now and has no numbers and no gradient here.

    Lists that a script has made of parameters before, and optimizers, then hold what the model holds. Where PyTorch
    itself keeps the parameter, in the graph of a backward that may still come, a stand-in of its own is returned.
    """
    explanations["meta"] = _OF_META
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
