"""Refuses what cannot be cut, planned or summed over ranks; says why a trace stopped, and what to write instead.

Where it is in doubt which dimension is the batch, `advice` says why, and which settings together make a model run.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import (
    BACKWARD_HOOKS,
    EXPORT,
    FAKE_TENSORS,
    FUNCTORCH,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    replaced,
)
from autovaruna.errors import TraceError
from autovaruna.graph.call import CallSpec, InputSpec
from autovaruna.graph.source_lines import (
    chain_of,
    first_line,
    is_users,
    line_with,
    modules_of,
    origin,
    users_line,
    where_raised,
)

WHOLE = "inputs='replicated', num_micro_batches=1, dynamic_batch=False"
"""What has every rank pass the same batch, and the model see all of it at once."""
EXAMPLE_OF = "in an argument {0} (batch_dims={{'{0}': 1}})"
EXAMPLE = EXAMPLE_OF.format("x")
_OTHERWISE = (
    "Expected a model that treats samples one by one, so that a batch can go through in micro-batches. Pass tensors "
    f"whose first dimension is the batch (batch_first=True), or say which one it is {EXAMPLE}; "
    "move what mixes samples (a contrastive loss, say) out of the model, or "
    f"pass {WHOLE} together: all ranks pass one batch, and the model sees it whole, as in plain PyTorch. "
    "With dynamic_batch=False alone each micro-batch is a batch of its own to the model."
)
FOR_COUNTS = (
    "Expected what follows from each sample's own numbers. Count before the model, and pass the result as an input "
    f"with a row for each sample; or pass {WHOLE} together: all ranks pass one batch, and the model counts over all of "
    "it, as in plain PyTorch. With dynamic_batch=False alone each micro-batch is a batch of its own to the model."
)
"""What to write where counts over the batch go into what a model gives for each sample."""
_MOST_NAMES = 3
_SPARSE: dict[Any, int] = {
    torch.ops.aten.embedding.default: 4,
    torch.ops.aten.embedding_bag.padding_idx: 5,
    torch.ops.aten.embedding_bag.default: 5,
}
"""Where operations say that the gradient of a weight is sparse."""
_OF_TRACERS = ("data-dependent", "DataDependent", "DynamicOutputShape")
_OF_OTHERS = (
    "tensor subclasses",
    "FakeTensor.__format__",
    "got FakeTensor",
    "concrete integers",
    "Cannot access data pointer",
)  # NumPy, formats, torch's C++
_OF_LENGTHS = "(Size-like symbols: u"
_OF_KEYS = "unhashable type: non-nested SymInt"
_BOUNDS = re.compile(r"Expected op to be '==', got \S+ for (.*\bbatch\b.*)")
"""What torch says of a bound on the batch size that is no whole number."""
_INTO = "into a submodule, or into a function with @autovaruna.keep_whole, which is then kept whole"
DRAWN = "it draws from Python's or numpy's generator, and a trace would fix what it drew (draw from torch)"
_DRAWS = re.compile(r"\b(random|np|numpy|randint|uniform|choice|shuffle)\b *[.(]")
_NUMPY = re.compile(r"\b(np|numpy)\b|\bfrom_numpy\(")
_TRANSFORM = "function transform of torch.func"
_WITHOUT_TRANSFORMS = (
    ". Expected a forward of the model itself without vmap, grad, jacrev, jvp and the like. Move the line "
    f"{_INTO} as one operation, or write it with ordinary operations."
)
TRANSFORMS = tuple(str(Path(*FUNCTORCH.split("."), name)) for name in ("eager_transforms.py", "vmap.py"))
_WANTS_NUMBERS = (*_OF_TRACERS, *_OF_OTHERS)
"""What is said where the numbers in a tensor are wanted, and a trace has none."""
_LOGGERS = (EXPORT, FAKE_TENSORS)


class InModuleError(Exception):
    """Says that the module at `path` does what a trace does not keep."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path


class BatchSizeError(TraceError):
    """Says that a graph would hold for one batch size alone."""


def check_operations(module: fx.GraphModule, held: Mapping[str, Any]) -> None:
    """Refuses operations that would fail later; `held` is what the graph holds beside parameters and buffers.

    Raises:
        TraceError: a weight has sparse gradients.
        InModuleError: the inside of a function transform is in the graph, or an operation that takes functions.
    """
    for node in module.graph.nodes:
        lost = held.get(str(node.target)) if node.op == "get_attr" and "lifted_tensor" in str(node.target) else None
        if isinstance(lost, FakeTensor) and not isinstance(lost, nn.Parameter):
            raise TraceError(
                f"The trace has lost how a value is made that {', '.join(map(str, node.users))} uses. Expected "
                "operations of torch; move what makes it into a submodule, which may then be kept whole."
            )
        place = _SPARSE.get(node.target)
        if place is not None and len(node.args) > place and node.args[place] is True:
            raise TraceError(
                f"An embedding has sparse=True at {origin(node) or node.name}: its weight would get sparse gradients, "
                "which are not summed over ranks. Expected sparse=False; the numbers are the same, and so are those of "
                "the optimizer (SGD or Adagrad in place of SparseAdam)."
            )
        is_transform = str(getattr(node.target, "__module__", "")).startswith(FUNCTORCH)
        if is_transform or isinstance(node.target, HigherOrderOperator):
            what = "a function transform of torch.func" if is_transform else f"{node.target}() of functions"
            raise InModuleError((modules_of(node) or [""])[-1], f"it uses {what} at {origin(node) or node.name}")


def check_model(model: nn.Module) -> None:
    """Refuses tensors that are not plain ones in memory, modules that no trace follows, and hooks of backward."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout is not torch.strided:
            raise TraceError(
                f"{name} is a sparse tensor: got {tensor.layout}, expected torch.strided. Register a dense one "
                "(to_dense()), or its indices and values, and make the sparse tensor in forward."
            )
    for path, each in model.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            raise TraceError(
                f"{path or 'The model'} is a TorchScript module: got {type(each).__qualname__}, which cannot be split. "
                "Expected a torch.nn.Module; take the one that it was made of."
            )
        if any(vars(each)[name] for name in BACKWARD_HOOKS):
            raise TraceError(
                f"{path or 'The model'} has a hook of backward, which a trace cannot keep. Expected none: write what "
                "it does to a gradient as a torch.autograd.Function, which returns its argument, in forward; what "
                "looks at gradients of weights, register on parameters."
            )


def refuse_loose(module: fx.GraphModule, loose: Collection[str]) -> None:
    """Refuses tensors, by attribute name, that need a gradient and are no parameters of the model, where one is due."""
    for node in module.graph.find_nodes(op="get_attr"):
        users = [user for user in node.users if user.target is not torch.ops.aten.detach.default]
        if node.target in loose and users and not users[0].meta.get("no_grad"):
            name = str(node.target).removeprefix("model.")
            what = "a tensor" if "lifted_tensor" in name else name
            raise TraceError(
                f"forward reads {what} {tuple(node.meta['val'].shape)} at {origin(users[0]) or users[0].name}, which "
                "needs a gradient and is no parameter of the model: got requires_grad=True, and no rank would sum its "
                "gradient. Expected a parameter (self.alpha = nn.Parameter(torch.zeros(3)) in __init__; an optimizer "
                "of its own may step over it), or, if nothing trains it, requires_grad_(False) or detach()."
            )


def refuse_hook(what: str) -> TraceError:
    return TraceError(
        f"forward {what}{users_line()}, which a trace cannot keep. Expected a forward without hooks; write what the "
        "hook does to the gradient as operations, or set it in a submodule, which is then kept whole."
    )


def refuse_parameter() -> TraceError:
    return TraceError(
        f"forward makes a parameter{users_line()}, which neither a trace nor the optimizer would know of. Expected "
        "modules and parameters that __init__ makes. If only the first call makes them, run one batch through the "
        "model before it is wrapped."
    )


def refuse_int() -> TraceError:
    return TraceError(
        f"forward asks for int() of a tensor{users_line()}: it needs the number in a tensor, which a trace does not "
        "have. Expected x.item() in place of int(x): the result can be a length of other tensors. Where Python goes by "
        f"the number, move the line {_INTO}."
    )


def refuse_backward(name: str) -> TraceError:
    """Returns the error of a forward that goes backward itself, by the function `name`."""
    return TraceError(
        f"forward goes backward itself ({name}){users_line()}, which a trace cannot keep. Expected a forward that "
        "leaves that to the caller; move what needs gradients into a submodule, which is then kept whole as one "
        "operation, or write the derivative as operations."
    )


def model_error(flat: nn.Module, inputs: list[Tensor], mode: FakeTensorMode) -> Exception | None:
    """Returns what the model itself raises on such inputs, not because it is traced."""
    try:
        with mode:
            flat(inputs)
    except Exception as error:
        is_of_tracer = type(error).__module__.startswith(("torch", "autovaruna")) or "fake impl" in str(error)
        return None if is_of_tracer or _is_about_data(error) or isinstance(error, TraceError) else error
    return None


def explain(
    error: Exception, model: nn.Module, call: CallSpec, is_dynamic: bool, places: tuple[str, str], own: Exception | None
) -> TraceError:
    """Says which line of the user's code stopped the trace, and what to do."""
    name = type(model).__qualname__
    if own is not None:
        inputs = ", ".join(f"{spec.name} {spec.passed_shape} {spec.dtype}" for spec in call.inputs)
        found = TraceError(
            f"{name} raises {type(own).__name__} on these inputs{where_raised(own)}: {first_line(own)}. Got {inputs}. "
            "Expected inputs that the model takes on one process, without AutoVaruna; try it so."
        )
        frames = traceback.extract_tb(own.__traceback__)
        if frames and is_users(frames[-1].filename):  # what torch raises there is told in our words
            found.own = own
            if sys.version_info >= (3, 11):
                own.add_note(str(found))
        return found
    where = where_raised(error)
    if is_dynamic and is_about_batch(error) and _OF_KEYS not in str(error) and not _uses_transform(error):
        fixed_at, bounded_at = places
        reason = _size_reason(error) + "; a submodule with such a line is kept whole" * bool(fixed_at)
        return refuse_batch_size(model, call, fixed_at or where or bounded_at, reason)
    if isinstance(error, InModuleError) and str(error) == DRAWN:
        where = line_with(_DRAWS, model.get_submodule(error.path))
    text = next(text for applies, text in _REASONS if applies(error, where)).format(
        line=first_line(error), reason=reason_of(error)
    )
    return TraceError(f"{name} cannot be traced{where}: {text}")


def refuse_batch_size(model: nn.Module, call: CallSpec, where: str, reason: str) -> BatchSizeError:
    return BatchSizeError(
        f"{type(model).__qualname__} fixes its batch size or mixes the samples of a batch{where}: {reason}. "
        f"{advice(model, call)}"
    )


def _uses_transform(error: BaseException) -> bool:
    """Whether a function transform of ``torch.func`` has stopped a trace, or what runs in one."""
    frames = [frame for link in chain_of(error) for frame in traceback.extract_tb(link.__traceback__)]
    return _TRANSFORM in str(error) or in_transform(frames)


def in_transform(frames: Sequence[traceback.FrameSummary]) -> bool:
    return any(frame.filename.endswith(TRANSFORMS) for frame in frames)


_REASONS: tuple[tuple[Callable[[Exception, str], bool], str], ...] = (
    (
        lambda error, where: _OF_KEYS in str(error),
        "a length that has no fixed number in a trace, that of the batch or one that numbers in tensors decide, is "
        "hashed there, as a key of a dict, a member of a set, or an argument of a cached function. Expected "
        "lengths that are compared and computed with. Leave the set or the cache out, move the line out of "
        f"forward, or {_INTO} as one operation; if it is the batch size, dynamic_batch=False fixes that.",
    ),
    (lambda error, where: _TRANSFORM in str(error), "{line}" + _WITHOUT_TRANSFORMS),
    (
        lambda error, where: _uses_transform(error),
        f"it uses a {_TRANSFORM}, inside of which a trace stops{_WITHOUT_TRANSFORMS}",
    ),
    (
        lambda error, where: _is_about_data(error) and _NUMPY.search(where) is not None,
        "it goes through NumPy, which needs the numbers in a tensor, and a trace has none. Expected operations of "
        f"torch, such as torch.sign(x) for np.sign(x); or move the line {_INTO} as one operation.",
    ),
    (
        lambda error, where: isinstance(error, InModuleError) and str(error) == DRAWN,
        f"{DRAWN}. Expected draws from torch, as torch.rand(()) < 0.5 in torch.where; or move the line that draws "
        "into a submodule, which is then kept whole, and draws alike on all ranks.",
    ),
    (
        lambda error, where: _OF_LENGTHS in str(error),
        "a length there follows from the numbers in a tensor (as that of torch.bincount, unique or nonzero does), "
        "and a trace has none. Expected lengths that shapes tell: F.one_hot(y, C).sum(0) for torch.bincount(y, "
        f"minlength=C), torch.where for a selection; or move the lines {_INTO}.",
    ),
    (
        lambda error, where: True,
        "{reason}. Expected a forward whose Python control flow does not depend on the numbers in tensors. Replace "
        f"the branch by torch.where, move it out of forward, or {_INTO} as one operation. If only the first call takes "
        "it (a flag says so, as of an ActNorm), run one batch through the model before it is wrapped.",
    ),
)
"""By what stopped a trace, and at which line: what to write instead, `reason` or `line` of the error in it."""


def reason_of(error: Exception) -> str:
    return (
        "it needs the number in a tensor, which a trace does not have" if _is_about_data(error) else first_line(error)
    )


def _size_reason(error: Exception) -> str:
    """Returns torch's words, unless they are about marks that the user has not made, or an error of its report."""
    line = first_line(error)
    if bounds := _BOUNDS.search(line):
        return f"it holds for {bounds[1]} alone"
    return "its result for one batch size does not hold for others" if line.startswith("Constraints violated") else line


def _is_about_data(error: Exception) -> bool:
    text = f"{type(error).__name__} {error}"
    return any(words in text for words in _WANTS_NUMBERS)


def is_about_batch(error: Exception) -> bool:
    """Whether the batch size (a symbol like ``s0``) stopped torch's trace, and not a number in a tensor (``u0``)."""
    if isinstance(error, TraceError) or _is_about_data(error):  # ours has a line of the user's, which may say s0
        return False
    text = f"{type(error).__name__} {error}"
    if _BOUNDS.search(text):
        return True
    marks = ("ConstraintViolation", "Constraints violated", "specialized", "batch !=", "Eq(")
    return any(mark in text for mark in marks) or re.search(r"\bs\d+\b", text) is not None


@contextmanager
def quiet_failure() -> Iterator[None]:
    """Drops what is written to standard error, and logged by the tracer, if what it surrounds raises."""
    written = io.StringIO()
    with ExitStack() as stack:
        for name in _LOGGERS:
            stack.enter_context(replaced(logging.getLogger(name), "disabled", True))
        with redirect_stderr(written):
            yield
        sys.stderr.write(written.getvalue())


def advice(model: nn.Module, call: CallSpec, paths: Collection[str] | None = None) -> str:
    """Returns what is odd of a call for which a model mixes samples in some modules, and what to write instead."""
    batch = [spec for spec in call.inputs if spec.is_batch]
    others = [spec for spec in call.inputs if not spec.is_batch]
    return (_of_graph(batch, others) or _of_time(model, call, others, paths) or _OTHERWISE) + _of_chance(batch)


def _of_chance(batch: list[InputSpec]) -> str:
    """Finds rows of numbers that may be as long as the batch by chance."""
    odd = [each for each in batch[1:] if len(each.shape) == 1 and each.dtype.is_floating_point]
    others = [each.name for each in batch if each not in odd]
    if not odd:
        return ""
    return (
        f" If {_shown(odd)} is as long as the batch by chance (weights of classes, say), name the inputs that have "
        f"samples: batch_inputs={others}."
    )


def _of_graph(batch: list[InputSpec], others: list[InputSpec]) -> str:
    """Finds lists of edges, which name rows of the batch, and matrices of which rows are joined."""
    first = batch[0]
    whole = [each for each in others if not each.dtype.is_floating_point]
    edges = [each for each in whole if len(each.shape) == 2 and each.shape[0] == 2]
    square = [each for each in batch[1:] if each.shape == (first.shape[0], first.shape[0])]
    are_nodes = len(first.shape) == 2 and first.dtype.is_floating_point  # whole numbers are texts, and time their rows
    if not are_nodes or not (edges or square):
        return ""
    return (
        f"{_shown((edges or square)[:1])} joins rows of {_shown([first])}, as the edges of a graph do its nodes, and "
        f"one graph cannot be parted. Expected {WHOLE} together: all ranks pass the one graph, and have the numbers of "
        "plain PyTorch. Or let each rank pass a graph of its own, with dynamic_batch=False: each micro-batch is then a "
        "batch of its own to the model, and with num_micro_batches=the number of ranks so is what each rank passes."
    )


def _of_time(model: nn.Module, call: CallSpec, others: list[InputSpec], paths: Collection[str] | None) -> str:
    """Finds the batch in a later dimension: of another input, or by a module that wants it there."""
    first = next(spec for spec in call.inputs if spec.is_batch)
    elsewhere = [spec for spec in others if _has_elsewhere(spec, first)]
    modules = [(path, each) for path, each in model.named_modules() if getattr(each, "batch_first", True) is False]
    if paths is not None:
        modules = [(path, each) for path, each in modules if path in paths]
    if elsewhere:
        what = f"which {_shown(elsewhere)} {'has' if len(elsewhere) == 1 else 'have'} in another one"
    elif modules and len(first.shape) > 1:
        path, module = modules[0]
        what = (
            f"but {path or 'the model'} ({type(module).__name__} with batch_first=False) takes the first one for time"
        )
    else:
        return ""
    return (
        f"The first dimension of {_shown([first])} is taken for the batch, {what}. "
        f"{naming(batch_dimensions(call)[0])} such modules with batch_first=True and pass tensors whose first "
        f"dimension it is. Or pass {WHOLE} together: all ranks pass one batch, and the model sees it whole, as in "
        "plain PyTorch."
    )


def naming(dimensions: Mapping[str, int]) -> str:
    """Returns the start of a sentence that says what dimensions to name, if there are any."""
    return f"Say which dimension is the batch in each, as batch_dims={dimensions}, or build" if dimensions else "Build"


def batch_dimensions(call: CallSpec) -> list[dict[str, int]]:
    """Returns what dimensions may be the batch, by inputs, where that is not the first one of all.

    Either it is of the first input, and others have it elsewhere; or the second one is, in all that have it of a size.
    """
    shapes = {spec.name: spec.passed_shape for spec in call.inputs}
    first = next(shape for shape in shapes.values() if shape)
    others = {name: shape for name, shape in shapes.items() if first[0] in shape[1:] and shape[0] != first[0]}
    found = [{name: shape.index(first[0], 1) for name, shape in others.items()}]
    found.append({name: 1 for name, shape in shapes.items() if first[1:2] == shape[1:2] != ()})
    return [each for each in found if each] or [{}]


def _has_elsewhere(spec: InputSpec, first: InputSpec) -> bool:
    """Whether an input has the batch size in another dimension, or the second dimension of a batch is its batch."""
    is_hidden = len(spec.shape) == len(("layers", "batch", "width")) and spec.shape[1:2] == first.shape[1:2]
    return first.shape[0] in spec.shape[1:] or spec.shape[:1] in [(length,) for length in first.shape[1:]] or is_hidden


def _shown(specs: list[InputSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.shape}" for spec in specs[:_MOST_NAMES])
