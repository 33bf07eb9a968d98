"""Holds every private name of torch that the library uses, and knows which versions of torch have them.

Each is found once, when this module is imported; where one is missing, the error says so with the version of torch.
Those of modules that take long to import are found with their first use.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from importlib import import_module
from operator import attrgetter
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.errors import SUPPORTED_TORCH

logger = logging.getLogger("autovaruna.graph")

# Modules that are known by their names alone.
FUNCTORCH = "torch._functorch"  # functions that transform others, as vmap
FAKE_TENSORS = "torch._subclasses.fake_tensor"
EXPORT = "torch.export._trace"
_MISSING = object()
IMPORTED_LATE = ("torch.export._trace", "sympy.tensor.tensor")
"""What a first trace imports, and whoever expects one may import before."""


def _missing(error: ImportError | AttributeError) -> ImportError:
    """Returns the error that says which name torch lacks."""
    name = str(error.name)
    if isinstance(error, AttributeError):
        holder = error.obj if hasattr(error.obj, "__name__") else type(error.obj)
        name = ".".join(filter(None, (getattr(holder, "__module__", ""), holder.__name__, name)))
    return ImportError(
        f"torch {torch.__version__} has no {name}, which this library needs. Expected {SUPPORTED_TORCH}; "
        "install one of these."
    )


try:
    import torch._subclasses.fake_tensor
    import torch._subclasses.functional_tensor
    import torch.fx.experimental.proxy_tensor
    import torch.nn.utils.clip_grad
    import torch.nn.utils.parametrize
    import torch.utils._python_dispatch
    import torch.utils._pytree
    import torch.utils._sympy.numbers
    import torch.utils._sympy.value_ranges
    import torch.utils.data
    import torch.utils.weak

    _interpreter = torch._C._functorch.peek_interpreter_stack  # that of the function transforms which are running
    pytree = torch.utils._pytree  # structures of lists and dicts, as torch.export takes them apart

    # Operators, as the nodes of a graph call them.
    OpOverload = torch._ops.OpOverload
    HigherOrderOperator = torch._ops.HigherOrderOperator  # takes functions, as torch.cond

    _CACHE_ENABLED = "_cache_enabled"  # of torch.nn.utils.parametrize

    rebuild_meta = torch._utils._rebuild_meta_tensor_no_storage  # a tensor on meta, as pickle takes it apart

    # Modes that see every operation, and how to leave them.
    TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
    disable_current_modes = torch.utils._python_dispatch._disable_current_modes
    DisableTorchFunction = torch._C.DisableTorchFunction  # for classes of tensors and for modes
    DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass  # for classes of tensors

    # Tensors without numbers, and those that torch.export wraps them in.
    without_memory: Any = Tensor._make_wrapper_subclass  # a tensor of a device that is of a class of our own
    subclasses: Any = torch._subclasses  # where libraries look for the class of fake tensors
    FakeTensor = torch._subclasses.fake_tensor.FakeTensor
    FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
    in_kernel_invocation = torch._subclasses.fake_tensor.in_kernel_invocation_manager  # they pass for meta tensors
    FunctionalTensor = torch._subclasses.functional_tensor.FunctionalTensor
    ModuleStackTracer: Any = torch.fx.experimental.proxy_tensor._ModuleStackTracer  # follows modules for torch.export
    FRAMES = "_filter_traceback_frames"  # which of the lines that led to an operation it keeps, where it has that
    _get_dispatch_mode = torch._C._get_dispatch_mode
    _FAKE = torch._C._TorchDispatchModeKey.FAKE

    # What is known of a tensor besides its numbers.
    preserve_version_counter = torch.autograd.grad_mode._unsafe_preserve_version_counter  # to write unseen by autograd
    is_view = Tensor._is_view
    _num_uses: Any = torch._C._storage_Use_Count
    swap_tensors: Any = torch._C._swap_tensor_impl  # torch.utils.swap_tensors refuses what the graph of a step holds

    by_tensor: Any = torch.utils.weak.WeakIdKeyDictionary  # maps tensors, as long as they are there

    foreach_norm: Any = torch._foreach_norm  # of many tensors at once, as torch's own clipping
    foreach_mul_: Any = torch._foreach_mul_

    pack_by_lengths: Any = torch._VF._pack_padded_sequence  # packs what ``pack_padded_sequence`` has put in order
    all_true = Tensor._is_all_true  # what torch's own checks of tensors ask

    # Autograd, from within.
    run_engine: Any = torch.autograd.Variable._execution_engine.run_backward  # without the checks of ``backward``
    SingleLevelFunction = torch.autograd.function._SingleLevelFunction  # a function that costs no look for transforms
    is_graph_kept: Any = torch._C._autograd._get_current_graph_task_keep_graph  # by the backward that runs now
    top_saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # those that are on now
    _pop_hooks: Any = torch._C._autograd._pop_saved_tensors_default_hooks
    _push_hooks: Any = torch._C._autograd._push_saved_tensors_default_hooks
    is_profiler_enabled = torch._C._autograd._profiler_enabled

    # Autocast, as graphs enter and leave it.
    enter_autocast = torch.amp.autocast_mode._enter_autocast
    exit_autocast = torch.amp.autocast_mode._exit_autocast
    is_any_autocast_enabled = torch._C._is_any_autocast_enabled
    set_gradients: Any = torch._C._set_grad_enabled  # turns gradients on and off, in a graph

    # What a worker of a DataLoader runs, and where that is looked up as one starts.
    workers: Any = torch.utils.data._utils.worker
    WORKER_LOOP = "_worker_loop"
    run_worker: Any = workers._worker_loop

    # What torch does for all of its own modules and optimizers.
    call_impl = nn.Module._call_impl  # runs a module with its hooks
    OWN_CALL = "_compiled_call_impl"  # where a module has what its calls are instead, as ``module.compile()`` does
    MODULES = "_modules"  # where a module has its own modules
    CONVERT = "_apply"  # makes each tensor of a module another
    convert_impl: Any = nn.Module._apply
    FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # tables of a module's hooks
    BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
    HOOKS = ("_forward_hooks", "_forward_pre_hooks", *BACKWARD_HOOKS)
    GLOBAL_HOOKS: Any = tuple(getattr(torch.nn.modules.module, f"_global{kind}") for kind in HOOKS)  # of all modules
    FLAT_WEIGHTS = "_flat_weights"  # the list of its weights that a recurrent module keeps
    VALIDATES = "_validate_args"  # whether a distribution checks its parameters
    NormBase = torch.nn.modules.batchnorm._NormBase
    parse_to: Any = torch._C._nn._parse_to  # the arguments of ``module.to``

    UNSCALE = "_unscale_grads_"  # of a GradScaler: looks for overflow in the gradients of an optimizer
    clip_grad: Any = torch.nn.utils.clip_grad
    NORM, CLIP = "_get_total_norm", "_clip_grads_with_norm_"  # the two halves of ``clip_grad_norm_``
    OPTIMIZER_HOOKS = tuple(  # tables of an optimizer's hooks, those of steps first
        f"_optimizer_{what}_{when}_hooks"
        for what in ("step", "state_dict", "load_state_dict")
        for when in ("pre", "post")
    )

    # Sizes that are symbols.
    check = torch._check  # adds what must hold
    int_oo = torch.utils._sympy.numbers.int_oo
    ValueRanges = torch.utils._sympy.value_ranges.ValueRanges
    FIXES_SIZE, COMPARES_SIZES = "_set_replacement", "_maybe_guard_rel"  # what a ShapeEnv does, where it has that

    # Attributes that are read or written where the objects are.
    for _sample, _names in (
        (Tensor, ("_version", "_backward_hooks")),
        (torch.UntypedStorage, ("_cdata",)),
        (nn.Module(), ("_parameters", "_buffers", "_modules", CONVERT, *HOOKS)),
        (nn.Module(), (OWN_CALL,)),
        (torch.ops.aten.mul.Tensor, ("_schema", "_op")),
        (torch.fx.Graph(), ("_codegen", "_root")),
        (torch.amp.GradScaler, (UNSCALE,)),
        (SimpleNamespace(**torch.optim.Optimizer.__annotations__), OPTIMIZER_HOOKS),
        (ModuleStackTracer, ("call_module", "getattr")),
        (torch.distributions.Distribution, (VALIDATES,)),
        (torch.nn.utils.clip_grad, (NORM, CLIP)),
        (torch.nn.utils.parametrize, (_CACHE_ENABLED,)),
        (nn.RNN(1, 1, device="meta"), (FLAT_WEIGHTS,)),
    ):
        for _name in _names:
            getattr(_sample, _name)
except (ImportError, AttributeError) as _error:
    raise _missing(_error) from _error


# Attributes that are read where the objects are.
parameter_table: Any = attrgetter("_parameters")  # what a module itself holds, by name; it may be written into
buffer_table: Any = attrgetter("_buffers")
module_table: Any = attrgetter("_modules")
version_of: Any = attrgetter("_version")  # how often a tensor, or a view of its memory, was written into
schema_of: Any = attrgetter("_schema")  # what an operator takes, changes and returns
kernel_of: Any = attrgetter("_op")  # what runs an operator, without the layer of Python above it
root_of: Any = attrgetter("_root")  # the node before the first one of a graph


def convert_tensors(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Makes each tensor of a module, and of those within it, another."""
    module._apply(convert)  # type: ignore[no-untyped-call]


def storage_of(tensor: Tensor) -> int:
    """Returns which memory a tensor lies in; views share theirs."""
    return int(tensor.untyped_storage()._cdata)


def set_backward_hook(leaf: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Has a hook see the gradient of a leaf, without the checks and the handle of ``register_hook``."""
    leaf._backward_hooks = {0: hook}


def is_parametrize_cached() -> bool:
    """Whether a script computes in `parametrize.cached()` now."""
    return bool(getattr(torch.nn.utils.parametrize, _CACHE_ENABLED))


def nccl_options(timeout: timedelta) -> Any:
    """Returns the options of a group of NCCL that gives up after some time."""
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def default_store() -> Any:
    """Returns the store in which the ranks of the default process group have met."""
    return _later("torch.distributed.distributed_c10d", "_get_default_store")()


def num_uses_of_storage(tensor: Tensor) -> int:
    """Returns how many tensors and other objects use the memory of a tensor, the one that counts included."""
    return int(_num_uses(storage_of(tensor)))


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Returns the hooks of an optimizer before and after its step, in order, by number."""
    before, after, *_ = (getattr(optimizer, name) for name in OPTIMIZER_HOOKS)
    return before, after


def generalize(function: Any) -> None:
    """Has TorchScript forget the sizes that it has specialised a function for, which has run before."""
    function._debug_flush_compilation_cache()


@cache
def warn_of_untried() -> None:
    """Logs one warning if this version of torch is not one that the library was tried on."""
    oldest, first_untried = (tuple(map(int, found)) for found in re.findall(r"(\d+)\.(\d+)", SUPPORTED_TORCH))
    if not oldest <= tuple(map(int, str(torch.__version__).split(".")[:2])) < first_untried:
        text = "torch %s has not been tried with this library, which expects %s"
        logger.warning(text, torch.__version__, SUPPORTED_TORCH)


def current_fake_mode() -> FakeTensorMode | None:
    """Returns the mode that makes the tensors of this thread fake ones now."""
    mode = _get_dispatch_mode(_FAKE)
    assert mode is None or isinstance(mode, FakeTensorMode)
    return mode


def mark_static(tensor: Tensor, dimensions: Iterable[int]) -> None:
    """Tells torch.compile that dimensions of a tensor never change; later calls do not change what it knows."""
    if not hasattr(tensor, "_dynamo_static_indices"):
        for dimension in dimensions:
            _later("torch._dynamo", "mark_static")(tensor, dimension)


def passes_of_export() -> Any:
    """Returns the module in which torch.export finds ``replace_set_grad_with_hop_pass``, its first pass."""
    name = "torch._export.passes.replace_set_grad_with_hop_pass"
    _later(name, "replace_set_grad_with_hop_pass")
    return import_module(name)


def mended_lstm() -> AbstractContextManager[None]:
    """Gives the last states of an LSTM on fake tensors the shape of real ones; torch 2.11 has a dimension too many."""
    name = "torch._decomp.decompositions"
    one_layer = _later(name, "one_layer_lstm")

    def mended(*args: Any, **kwargs: Any) -> Any:
        output, states = one_layer(*args, **kwargs)
        return output, tuple(each[0] if each.dim() == 3 else each for each in states)

    return replaced(import_module(name), "one_layer_lstm", mended)


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Puts something else in the place of an attribute, which may be missing, while the context lasts."""
    own = vars(owner).get(name, _MISSING)  # as it is there: what a class inherits, or wraps, stays so
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def replaced_here(owner: Any, name: str, act: Callable[..., Any]) -> Iterator[None]:
    """Has `act`, which is given it first, run in the place of a function on this thread while the context lasts."""
    thread, plain = get_ident(), getattr(owner, name, None)

    def call(*args: Any, **kwargs: Any) -> Any:
        return act(plain, *args, **kwargs) if get_ident() == thread or plain is None else plain(*args, **kwargs)

    with replaced(owner, name, call):
        yield


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Has tensors saved for backward as they are, whatever hooks around would make of them."""
    hooks = []
    while (pair := top_saved_tensors_hooks(True)) is not None:
        hooks.append(pair)
        _pop_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            _push_hooks(*pair)


@contextmanager
def hide_tracing() -> Iterator[None]:
    """Lets ``torch.compiler.is_compiling()`` and ``is_exporting()`` say no while the context lasts."""
    compiler = torch.compiler
    with replaced(compiler, "_is_compiling_flag", False), replaced(compiler, "_is_exporting_flag", False):
        yield


def _later(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _missing(error) from error


def is_transforming() -> bool:
    """Whether a function transform of ``torch.func`` is running."""
    return _interpreter() is not None
