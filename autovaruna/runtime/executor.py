"""Runs the tasks of a rank: one short method for each kind of instruction, and a table that joins them (`_METHODS`).

forward     waits for inputs and activations, runs the stage, starts to send what it returns
recompute   runs the forward again, from what the stage received and the state that it found
backward    waits for gradients, runs backward, starts to send the gradients of what the stage received
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from autovaruna._torch import preserve_version_counter
from autovaruna.config.settings import Settings
from autovaruna.graph.call import InputSpec
from autovaruna.graph.export.watchers import call_hooks
from autovaruna.graph.key_values import kept_of
from autovaruna.graph.opaque.run import saving_nothing
from autovaruna.graph.random import RandomStream
from autovaruna.graph.source_lines import failed_at
from autovaruna.graph.traced import TracedModel
from autovaruna.ranks.transport.layout import is_dense, to_host
from autovaruna.ranks.world import World
from autovaruna.runtime.autograd import arrive, go_backward
from autovaruna.runtime.batch import GlobalBatch, MicroBatch, OwnSamples
from autovaruna.runtime.gradients import Backwards, GradientBook
from autovaruna.runtime.mail import Mail, MessageKind
from autovaruna.runtime.metrics import Metrics
from autovaruna.runtime.program import ModelCall, Task
from autovaruna.runtime.remote_parameter import RemoteTensor
from autovaruna.runtime.scaler import LossScale
from autovaruna.runtime.timeline import EventTrace
from autovaruna.runtime.weights import OwnedState, steps_here
from autovaruna.runtime.witness import Witness
from autovaruna.schedule.pipeline import Kind
from autovaruna.stage.module import StageModule

NOTHING: Mapping[str, Tensor] = {}
OutputGradient = Callable[[int, MicroBatch], Tensor | None]
"""Returns the gradient of an output, by its place, for a micro-batch; None: no backward starts there."""


@dataclass(slots=True, eq=False)
class InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward.

    Attributes:
        tensors: what it has received, until the forward has ended.
        returned: what the forward returned, with its graph.
        gradients: those of what it has received.
        before: state that the forward found and changed.
        stash: what it has received, if it runs forward again.
    """

    tensors: Mapping[str, Tensor]
    returned: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    before: Mapping[str, Tensor] = field(default_factory=dict)
    stash: Stash | None = None


class Stash:
    """Tensors of a micro-batch between its forward and its recompute; those on a GPU may go to the host meanwhile.

    Copies run on the current stream in pinned memory, and nobody waits for them: the memory that a tensor had on the
    GPU is given to later work of the same stream alone, which comes after the copy.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, is_offloaded: bool) -> None:
        self._devices = {name: tensor.device for name, tensor in tensors.items()}
        self._tensors = {
            name: to_host(tensor, non_blocking=True) if is_offloaded and is_dense(tensor) else tensor
            for name, tensor in tensors.items()
        }

    def pop(self) -> dict[str, Tensor]:
        """Returns the tensors, on the devices where they were, and keeps them no longer."""
        tensors, self._tensors = self._tensors, {}
        return {name: tensor.to(self._devices[name], non_blocking=True) for name, tensor in tensors.items()}


class ChangedState:
    """The buffers (and parameters) of this rank's stages that the forwards of one call change.

    Some change once a call in plain PyTorch, whatever the samples are: the vectors of spectral normalisation, say. Of
    these, if there are several micro-batches, each finds what the first one found.
    """

    def __init__(self, traced: TracedModel, num_micro_batches: int) -> None:
        self.changes_once = num_micro_batches > 1 and bool(traced.steady_state)
        self._traced = traced
        self._before_first: dict[int, dict[str, Tensor]] = {}

    def restore_once_a_call(self, stage: StageModule) -> None:
        """Gives a micro-batch what the first one found of the state that changes once a call."""
        steady = stage.changed_state(self._traced.steady_state)
        if stage.index in self._before_first:
            _overwrite(steady, self._before_first[stage.index])
        else:
            self._before_first[stage.index] = _copies(steady)

    def copy(self, stage: StageModule) -> dict[str, Tensor]:
        """Returns the state before a forward, for when it runs again."""
        return _copies(stage.changed_state(self._traced.changed_state))

    @contextmanager
    def restored(self, stage: StageModule, before: Mapping[str, Tensor]) -> Iterator[None]:
        """Restores the state before a forward while it runs again; afterwards the state is what it was."""
        changed = stage.changed_state(self._traced.changed_state)
        now = _copies(changed)
        _overwrite(changed, before)
        yield
        _overwrite(changed, now)


def _copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def _overwrite(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Overwrites what forwards change; no backward reads it, so autograd need not know."""
    for name, value in values.items():
        with preserve_version_counter(state[name]):
            state[name].copy_(value)


@dataclass(eq=False)
class RankContext:
    """What all calls of a model have in common on this rank, which holds `parameters`, and steps over those `stepped`.

    `asks_for_sums()`: gradients are to be summed over ranks; what it returns when a backward comes counts. `witness`
    looks at some steps; None: that is turned off. `books` have the gradients of each graph.
    """

    world: World
    device: torch.device
    state: OwnedState
    settings: Settings
    loss_scale: LossScale
    metrics: Metrics
    asks_for_sums: Callable[[], bool]
    trace: EventTrace | None
    witness: Witness | None

    def __post_init__(self) -> None:
        self.parameters: Mapping[str, Tensor] = {
            name: each
            for name, each in self.state.parameters().items()  # calls refuse others in their place
            if not isinstance(each, RemoteTensor) and not each.is_meta
        }
        self.stepped = {name: each for name, each in self.parameters.items() if steps_here(each)}
        self.mail = Mail(self.world, self.device)
        self.books: list[GradientBook] = []
        self.backwards = Backwards(self.state, self.books)


class Executor:
    """Runs the tasks of one call, and keeps what they make.

    Attributes:
        outputs: those of this rank's stages, by (output, micro-batch).
        input_gradients: those that this rank's stages make, by (input, micro-batch).
        retains_graphs: whether the same backwards may run again.
    """

    def __init__(self, call: ModelCall, rank: RankContext) -> None:
        program = self._program = call.program
        self._call, self._rank, self._mail, self._world = call, rank, rank.mail, rank.world
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.input_gradients: dict[tuple[str, int], Tensor | None] = {}
        self.retains_graphs = False
        self._kept = kept_of(call.inputs, program.kept_inputs)
        own = program.batch.owned_by(rank.world.rank)
        self._samples = OwnSamples(call.inputs, program.traced.batch_inputs, own)
        self._state = ChangedState(program.traced, len(program.batch.micro_batches))
        self._in_flight: dict[tuple[int, int], InFlight] = {}  # by stage and micro-batch
        self._output_gradient: OutputGradient = no_gradient
        self._task: Task | None = None
        self.observation = None if rank.witness is None else rank.witness.begin(call)

    def hand_out_samples(self) -> None:
        """Sends this rank's samples to the stages that use them; never blocks."""
        for part, parcel in self._program.handed_out:
            self._mail.send([self._samples.of(part, name) for name in parcel.names], parcel.kind)
        if self._kept:
            self._move_kept()

    def _move_kept(self) -> None:
        """Takes what stages have kept to those that use it, where others made it. Collective."""
        plan, batch, messages = self._program.graph.plan, self._program.batch, self._program.messages
        arriving = list[tuple[dict[int, Tensor], int, MessageKind]]()
        for place, (name, kept) in enumerate(self._kept.items()):
            using = [stage.index for stage in self._program.split.stages if name in stage.inputs]
            for stage in using:
                for m, part in batch.micro_batches.items():
                    ends = plan.rank_of(kept.stage, m), plan.rank_of(stage, m)
                    kind = messages.kept(place, *ends, part)
                    if ends[0] != ends[1] and self._world.rank == ends[0]:
                        self._mail.send([kept.parts[m]], kind)
                    elif ends[0] != ends[1] and self._world.rank == ends[1]:
                        arriving.append((kept.parts, m, kind))
        for parts, m, kind in arriving:
            (parts[m],) = filter(torch.is_tensor, self._mail.receive(kind))

    def run(self, tasks: Sequence[Task], output_gradient: OutputGradient) -> None:
        """Runs tasks in order; from the second step on, a stage's sums start after its last backward on this rank."""
        mail, world, trace, graph = self._mail, self._world, self._rank.trace, self._program.graph
        self._output_gradient = output_gradient
        mail.follow([task.receives for task in tasks])
        idle = set(graph.stages)
        start, waited_before = perf_counter(), mail.waited_seconds
        with torch.set_grad_enabled(self._call.needs_gradient):
            for position, task in enumerate(tasks, 1):
                self._task, instruction = task, task.instruction
                began, waited = perf_counter(), mail.waited_seconds
                if task.ends_stage and graph.book.early:
                    graph.book.follow(graph.stages[instruction.stage])
                _METHODS[instruction.kind](self, graph.stages[instruction.stage], task)
                if trace is not None:
                    trace.recorded.append((instruction, began, perf_counter(), mail.waited_seconds - waited))
                if task.ends_stage:
                    idle.discard(instruction.stage)
                    graph.book.end_stage(instruction.stage)
                if position >= mail.due:
                    mail.go_to(position)
                world.poll()
        account, waited = self._rank.metrics.account, mail.waited_seconds - waited_before
        account.work += perf_counter() - start - waited
        account.bubble += waited
        for stage in idle:
            graph.book.end_stage(stage)

    def _forward(self, stage: StageModule, task: Task) -> None:
        part = task.part
        state = InFlight(self._received(task))
        if self._state.changes_once:
            self._state.restore_once_a_call(stage)
        needs_gradient = self._call.needs_gradient
        keeps_graph = needs_gradient and stage.index not in self._program.graph.recomputing
        if needs_gradient and not keeps_graph:
            state.before = self._state.copy(stage)
        if self.observation is not None:
            self.observation.arrive(stage, part, state.tensors, self._call.of_batch.get(part.weight, NOTHING))
        returned = self._run_stage(stage, part, state, keeps_graph)
        for call in stage.part.watched:
            call_hooks(self._rank.state.model, call, returned)
        for kind, names in task.sends:
            self._mail.send([returned[name].detach() for name in names], kind)
        for place, name in stage.part.outputs:
            self.outputs[place, part.index] = compact(returned[name])
        if keeps_graph:
            state.returned = returned
        elif needs_gradient:
            state.stash = Stash(state.tensors, is_offloaded=self._rank.settings.offload)
        state.tensors = NOTHING
        if needs_gradient:
            self._in_flight[stage.index, part.index] = state

    def _recompute(self, stage: StageModule, task: Task) -> None:
        state = self._in_flight[stage.index, task.part.index]
        assert state.stash is not None, "a stage that recomputes has kept what it received"
        state.tensors = state.stash.pop()
        if self.retains_graphs:
            state.stash = Stash(state.tensors, is_offloaded=self._rank.settings.offload)
        with self._state.restored(stage, state.before):
            state.returned = self._run_stage(stage, task.part, state, keeps_graph=True)
        state.tensors = NOTHING

    def _backward(self, stage: StageModule, task: Task) -> None:
        place = stage.index, task.part.index
        state = self._in_flight[place]
        retains_graph = self.retains_graphs and stage.index not in self._program.graph.recomputing
        roots, gradients = list[Tensor](), list[Tensor]()
        for name, gradient in self._received_gradients(stage, task):
            if gradient is not None and (root := state.returned[name]).requires_grad:
                roots.append(root)
                gradients.append(gradient)
                if self.observation is not None:
                    self.observation.go_back(stage, task.part, name, gradient)
        if not retains_graph:
            state.returned = NOTHING
        if not self.retains_graphs:
            del self._in_flight[place]
        if roots:
            go_backward(roots, gradients, retains_graph)
        for kind, names in task.sends:
            self._mail.send(list(map(state.gradients.get, names)), kind)
        for name, holder in self._program.split.input_gradients.items():
            if holder == stage.index:
                self.input_gradients[name, task.part.index] = state.gradients.get(name)
        state.gradients.clear()

    def _run_stage(self, stage: StageModule, part: MicroBatch, state: InFlight, keeps_graph: bool) -> dict[str, Tensor]:
        call, lengths = self._call, self._program.lengths
        stream = RandomStream(call.seed, call.number, part.index, self._rank.device) if stage.is_random else None
        tensors = self._leaves(stage, state) if call.needs_gradient else state.tensors
        if call.of_batch:
            tensors = {**tensors, **call.of_batch.get(part.weight, NOTHING)}
        if call.needs_gradient and not keeps_graph:
            with saving_nothing():
                return stage.run(tensors, part.size, stream, lengths)
        return stage.run(tensors, part.size, stream, lengths)

    def _leaves(self, stage: StageModule, state: InFlight) -> Mapping[str, Tensor]:
        """Turns what the stage received into leaves, whose gradients come to lie in `state`."""
        tensors = dict(state.tensors)
        for name in self._program.wanted[stage.index]:
            if name in tensors:
                tensors[name] = arrive(tensors[name], state.gradients, name)
        return tensors

    def _received(self, task: Task) -> dict[str, Tensor]:
        """Returns all that a forward works on, by name."""
        tensors: dict[str, Tensor] = {}
        for name in task.own:  # first what is here: the rest may still be on its way
            is_kept = name in self._kept
            tensors[name] = self._kept[name].parts[task.part.index] if is_kept else self._samples.of(task.part, name)
        for kind, names in task.receives:
            for name, tensor in zip(names, self._mail.receive(kind), strict=True):
                assert tensor is not None, f"{name} is always there; gradients alone may be missing"
                tensors[name] = tensor
        return tensors

    def _received_gradients(self, stage: StageModule, task: Task) -> list[tuple[str, Tensor | None]]:
        """Returns the gradients of what a stage returns: of the model's outputs first, then of what it sent."""
        arrived, own = list[tuple[str, Tensor | None]](), list[tuple[str, Tensor | None]]()
        for kind, names in task.receives:
            arrived += zip(names, self._mail.receive(kind), strict=True)
        for place, name in stage.part.outputs:
            own.append((name, self._output_gradient(place, task.part)))
        return own + arrived

    def where(self, error: BaseException) -> str:
        """Returns rank, stage and micro-batch, and the line of the user's model if an operation raised `error`."""
        rank, program = self._world.rank, self._program
        if self._task is None:
            return f"rank {rank}, before the first instruction"
        part = self._task.part
        owner = "" if len(program.batch.groups) == 1 else f" of rank {part.origin}"
        samples = f"samples {part.start} to {part.start + part.size - 1}{owner}"
        place = f"rank {rank}, stage {self._task.instruction.stage}, micro-batch {part.index} ({samples})"
        line = failed_at(error, program.traced.nodes)
        return place + line + (_given_whole(program.traced.inputs.values(), part, program.batch) if line else "")


_METHODS: dict[Kind, Callable[[Executor, StageModule, Task], None]] = {
    Kind.FORWARD: Executor._forward,
    Kind.RECOMPUTE: Executor._recompute,
    Kind.BACKWARD: Executor._backward,
}


def no_gradient(place: int, part: MicroBatch) -> Tensor | None:
    return None


def compact(output: Tensor) -> Tensor:
    """Returns an output without its graph, and without memory of more: torch leaves a mean in that of its terms."""
    output = output.detach()
    is_one_number = output.numel() == 1  # to copy it takes less than to look
    return output.clone() if is_one_number or output.untyped_storage().nbytes() > 2 * output.nbytes else output


def _given_whole(inputs: Iterable[InputSpec], part: MicroBatch, batch: GlobalBatch) -> str:
    """Returns a sentence about the inputs that a part of a mini-batch has whole, whose numbers may not fit to it."""
    whole = [f"{each.name} {each.words()}" for each in inputs if not each.is_batch and each.shape]
    if not whole or part.size == batch.num_samples_of(part.origin):
        return ""
    return (
        f". Every micro-batch has its own samples, but all of {', '.join(whole)}, whose first dimension is not the "
        "batch. If numbers in there name samples (the edges of a graph, say), pass "
        f"num_micro_batches={len(batch.groups)}, so that each is all that a rank passes"
    )
