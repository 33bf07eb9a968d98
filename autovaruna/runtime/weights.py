"""Gives each rank its part of a model: who holds what, who steps over it, and its whole state put together again.

Weights start as rank 0's, and what a rank does not hold is released. Parameters on ``meta`` get their numbers here.
A parameter whose optimizer state is shared out has one owner, which alone has gradient and state: the others show a
`RemoteGradient`, and get the numbers once all have stepped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from autovaruna._torch import buffer_table, by_tensor, parameter_table, version_of
from autovaruna.errors import InputError, PlanError
from autovaruna.graph.module_state import replace_tensor
from autovaruna.graph.random import seed_generators, untouched_generator
from autovaruna.planner.records import Plan, share_out
from autovaruna.ranks.buckets import GradientSums
from autovaruna.ranks.transport.layout import distinct
from autovaruna.ranks.world import World
from autovaruna.runtime.remote_parameter import Home, RemoteGradient, RemoteTensor, release, without_overrides
from autovaruna.stage.split import Assignment


def materialize(
    state: OwnedState, held: Iterable[str], device: torch.device, seed: int, given: Container[str] = ()
) -> list[str]:
    """Initialises parameters and buffers on ``meta``, if their first names are among those `held` here; returns those.

    Each module is initialised from a seed of its own path, so that its numbers do not depend on the partition. What a
    checkpoint will fill, as `given`, gets memory alone, unless its module has other tensors.

    Raises:
        PlanError: a module with tensors on ``meta`` has no initialiser.
    """
    wanted = set(held)
    missing = {name for name in state.places if state.tensor(name).is_meta and name in wanted}
    drawn = {name for name in missing if name not in given}
    for name in missing - drawn:
        state.replace(name, _empty_like(state.tensor(name), device))
    with untouched_generator(device):
        for path, module in state.model.named_modules():
            own = [f"{path}.{name}" if path else name for name in (*parameter_table(module), *buffer_table(module))]
            names = [state.first_name[name] for name in own if name in state.first_name]
            if not drawn.isdisjoint(names):
                _initialise(state, path, module, names, device, seed)
    return sorted(missing)


def _initialise(
    state: OwnedState, path: str, module: nn.Module, names: list[str], device: torch.device, seed: int
) -> None:
    for name in names:
        if state.tensor(name).is_meta:
            state.replace(name, _empty_like(state.tensor(name), device))
    digest = hashlib.blake2b(f"{seed},{path}".encode(), digest_size=7).digest()
    seed_generators(device, int.from_bytes(digest, "little"))
    reset = getattr(module, "reset_parameters", None)
    initialise = getattr(state.model, "_init_weights", None)
    with torch.no_grad():
        if callable(initialise):
            initialise(module)
        elif callable(reset):
            reset()
        else:
            raise PlanError(
                f"{path or type(module).__qualname__} is on the meta device and has neither reset_parameters() nor, in "
                "its model, _init_weights(module): got no numbers for "
                f"{', '.join(names)}. Give the module a reset_parameters(), or load a checkpoint first."
            )


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.zeros_like(tensor, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


@dataclass(frozen=True)
class Placement:
    """Which ranks hold each parameter, and each buffer that a step changes, by first name.

    Names that are missing are held by every rank. The first holder is the one that others follow. Where the optimizer's
    state is shared out, `owners` are the holders that have gradient and state of a parameter.
    """

    holders: dict[str, tuple[int, ...]]
    num_ranks: int
    owners: Mapping[str, int] = field(default_factory=dict)

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Returns the ranks that hold a parameter or buffer, the leading one first."""
        return self.holders.get(name, tuple(range(self.num_ranks)))

    def steppers_of(self, name: str) -> tuple[int, ...]:
        """Returns the ranks that have gradient and state of a parameter, and step over it, the leading one first."""
        return (self.owners[name],) if name in self.owners else self.ranks_of(name)

    def divides(self, names: Iterable[str]) -> bool:
        """Says whether a rank steps but over some of the parameters."""
        return any(len(self.steppers_of(name)) < self.num_ranks for name in names)

    def splits(self, names: Iterable[str]) -> bool:
        return any(len(self.ranks_of(name)) < self.num_ranks for name in names)


def placement_of(assignment: Assignment, plan: Plan, shared_bytes: Mapping[str, float] | None = None) -> Placement:
    """Returns the placement of a plan's stages; `shared_bytes` are of parameters that replicas share out."""
    holders = {
        name: tuple(dict.fromkeys(rank for stage in stages for rank in plan.stages[stage].ranks))
        for name, stages in assignment.holders.items()
    }
    return Placement(holders, plan.num_ranks, share_out(shared_bytes or {}, holders))


class OwnedState:
    """The parameters and buffers of a model by first name; those that are not held here become `RemoteTensor`s."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.places: dict[str, list[tuple[nn.Module, str]]] = {}
        self.first_name: dict[str, str] = {}
        self._tables: dict[str, tuple[Any, str]] = {}
        self._types: dict[str, tuple[torch.dtype, torch.device]] = {}
        first: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for table in (parameter_table(module), buffer_table(module)):
                for name, tensor in table.items():
                    if tensor is not None:
                        full = f"{path}.{name}" if path else name
                        known = first.setdefault(id(tensor), full)
                        self.first_name[full] = known
                        self.places.setdefault(known, []).append((module, name))
                        self._tables.setdefault(known, (table, name))

    def entries(self) -> dict[str, Any]:
        """Returns the model's own ``state_dict``: an integration may show another one in its place."""
        state_dict: Any = self.model.state_dict
        found: dict[str, Any] = getattr(state_dict, "plain", state_dict)()
        return found

    def tensor(self, name: str) -> Tensor:
        """Returns a parameter or buffer by first name, on ``meta`` if this rank does not hold it."""
        if name not in self._tables:
            raise InputError(f"{name} came after the first call: register it before, or wrap the changed model anew.")
        table, attribute = self._tables[name]
        if attribute not in table:
            raise InputError(
                f"{name} was removed after the first call: remove it before, or wrap the changed model anew."
            )
        found: Tensor = table[attribute]
        return found

    def parameters(self) -> dict[str, nn.Parameter]:
        held = ((name, *place) for name, place in self._tables.items())
        found = {name: table[attribute] for name, table, attribute in held if attribute in table}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, nn.Parameter)}

    def buffers(self) -> dict[str, Tensor]:
        found = {name: self.tensor(name) for name in self.places}
        return {name: tensor for name, tensor in found.items() if not isinstance(tensor, nn.Parameter)}

    def distribute(
        self, placement: Placement, world: World, device: torch.device, seed: int, given: Container[str] = ()
    ) -> None:
        """Gives every rank its part, with the numbers of rank 0, and frees the rest. Collective.

        Weights on ``meta`` are drawn from the seed; a checkpoint will fill what is `given`, by first name.
        """
        held = {name for name in self.places if world.rank in placement.ranks_of(name)}
        drawn = set(materialize(self, held | self.buffers().keys(), device, seed, given))  # all ranks get all buffers
        somewhere = set().union(*world.gather_objects(drawn, "materialising weights"))
        for name in [name for name in self.places if name not in given]:
            ranks = placement.ranks_of(name)
            root = ranks[0] if name in somewhere else 0
            group = tuple(sorted({root, *ranks}))
            if world.rank in group and len(group) > 1:
                world.broadcast(distinct(self.tensor(name).detach()), root, group)
        own = {name: each for name, each in self.parameters().items() if name in held}
        self._types = {name: (each.dtype, each.device) for name, each in own.items()}
        for name in self.places.keys() - held:
            if isinstance(tensor := self.tensor(name), nn.Parameter):
                home = Home(name, placement.ranks_of(name), world.rank, device, tensor.shape)
                self.replace(name, release(tensor, home))

    def share_changes(self, roots: Mapping[str, int], placement: Placement, world: World) -> None:
        """Overwrites changed buffers everywhere, and parameters where held, by those of their roots. Collective."""
        every = tuple(range(world.num_ranks))
        groups: dict[tuple[int, tuple[int, ...], torch.dtype], list[Tensor]] = {}
        for name, root in sorted(roots.items()):
            tensor = self.tensor(name)
            ranks = placement.ranks_of(name) if isinstance(tensor, nn.Parameter) else every
            groups.setdefault((root, ranks, tensor.dtype), []).append(tensor.detach())
        for (root, ranks, _), tensors in sorted(groups.items(), key=lambda group: str(group[0])):
            if len(ranks) > 1 and world.rank in ranks:
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
                world.broadcast(flat, root, ranks)
                parts = torch.split(flat, [each.numel() for each in tensors])
                for tensor, part in zip(tensors, parts, strict=True) if world.rank != root else ():
                    tensor.data.copy_(part.view(tensor.shape))  # autograd may have kept it

    def follow_frozen(self, placement: Placement, world: World) -> bool:
        """Lets parameters need a gradient where they are not held if they do where they are. Collective.

        Returns whether that changed any parameter on any rank.
        """
        parameters = self.parameters()
        flags = {name: parameter.requires_grad for name, parameter in parameters.items()}
        reports = world.gather_objects(flags, "comparing frozen parameters")
        is_changed = False
        for name, parameter in parameters.items():
            ranks = placement.ranks_of(name)
            needs_gradient = reports[ranks[0]][name]
            followers = set(range(world.num_ranks)) - set(ranks)
            is_changed |= any(reports[rank][name] != needs_gradient for rank in followers)
            if world.rank in followers:
                parameter.requires_grad_(needs_gradient)
        return is_changed

    def check_types(self) -> None:
        """Raises an `InputError` if parameters of this rank have been cast or moved since they were given out."""
        for name, (dtype, device) in self._types.items():
            tensor = self.tensor(name)
            if tensor.dtype is not dtype or tensor.device != device:
                raise InputError(
                    f"Parameters have been cast or moved after the model was split: {name} is {tensor.dtype} on "
                    f"{tensor.device}, expected {dtype} on {device}. Cast or move the model before the first call; for "
                    "lower precision from then on, use torch.autocast around the call."
                )

    def replace(self, name: str, tensor: Tensor) -> None:
        for module, attribute in self.places[name]:
            replace_tensor(module, attribute, tensor)


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A model of which this rank holds a part; `limits` has what its gradients were last clipped to, if they were."""

    known_state: ReferenceType[OwnedState]
    placement: Placement
    world: World
    limits: list[float] = field(default_factory=list)

    def parameters(self) -> dict[str, nn.Parameter]:
        state = self.known_state()
        return {} if state is None else state.parameters()

    def names(self) -> dict[int, str]:
        """Returns the first name of each parameter, by identity."""
        return {id(each): name for name, each in self.parameters().items()}

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients by first name of their parameters."""
        with without_overrides():  # many may be elsewhere
            gradients = {name: each.grad for name, each in self.parameters().items()}
        return {name: each for name, each in gradients.items() if each is not None}


_models: WeakKeyDictionary[OwnedState, SplitModel] = WeakKeyDictionary()


def register_split(state: OwnedState, placement: Placement, world: World) -> None:
    """Registers a split model, for as long as its state is there."""
    _models[state] = SplitModel(ref(state), placement, world)


def split_models() -> list[SplitModel]:
    return list(_models.values())


class StateCopies:
    """Copies of parameters and buffers that a script was given, in which it may write.

    They are kept until `write_back`, so that what was written into a state that the script has dropped counts; from
    then on, for as long as the script keeps them.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._known: list[tuple[Callable[[], Tensor | None], int, Tensor]] = []

    def add(self, given: Tensor, own: Tensor) -> None:
        """Records that a script was given a copy of a tensor."""
        self._kept.append(given)
        self._known.append((ref(given), version_of(given), own))

    def write_back(self) -> None:
        """Copies what has been written since into the model."""
        if not self._known:
            return
        known, self._known = self._known, []
        with torch.no_grad():
            for find, version, own in known:
                if (given := find()) is None:
                    continue
                if version_of(given) != version:
                    own.copy_(given)
                self._known.append((find, version_of(given), own))
        given = None
        self._kept.clear()


def whole_state(
    state: OwnedState, placement: Placement, world: World, what: str, copies: StateCopies
) -> dict[str, Any]:
    """Returns the whole model's ``state_dict`` on every rank. Collective; `what` names it in errors.

    Its tensors are on the CPU, wherever the model is: no GPU need have room for all of it. Tied entries share one
    tensor, as in plain PyTorch. What a script writes into them reaches the model through `copies`.
    """
    world.barrier(what)  # says so if a rank is elsewhere, as messages do not
    entries = state.entries()
    fetched: dict[str, Tensor] = {}
    for name, value in entries.items():
        first = state.first_name.get(name)
        if first is None or not isinstance(value, Tensor):
            continue
        ranks = placement.ranks_of(first)
        if first not in fetched:
            is_everywhere = len(ranks) == world.num_ranks and first not in placement.holders
            fetched[first] = value.cpu() if is_everywhere else from_rank(value, ranks[0], world)
            if fetched[first] is not value and not value.is_meta:
                copies.add(fetched[first], value)
        entries[name] = fetched[first]
    return entries


def from_rank(value: Any, root: int, world: World) -> Any:
    """Returns a copy of what rank `root` has, on the CPU, if it is a tensor: others pass one like it or on ``meta``."""
    if not isinstance(value, Tensor):
        return value
    is_root = world.rank == root
    tensor = value.detach().to("cpu", copy=True) if is_root else torch.empty(value.shape, dtype=value.dtype)
    world.broadcast(tensor, root, tuple(range(world.num_ranks)))
    return tensor


def load_part(state: OwnedState, entries: Mapping[str, Any], is_strict: bool) -> Any:
    """Loads this rank's part of a whole ``state_dict``; returns and raises as plain PyTorch."""
    known = state.entries()
    away = {name for name, value in known.items() if isinstance(value, Tensor) and value.is_meta}
    given = {name: value.to("meta") if name in away else value for name, value in entries.items()}
    return state.model.load_state_dict(given, strict=is_strict)


@dataclass(eq=False)
class SharedParameter:
    """A parameter that this rank holds, with other `ranks`, and of which one rank, its home, has gradient and state.

    `gradient` is what this rank shows of the gradient, if it is another's; the same in every step.
    """

    home: Home
    ranks: tuple[int, ...]
    world: World
    gradient: RemoteGradient | None = field(default=None, init=False)

    @property
    def owner(self) -> int:
        return self.home.ranks[0]


_shared: Any = by_tensor()


def shared_parameter(parameter: Tensor) -> SharedParameter | None:
    """Returns who shares a parameter's state; None: every rank that holds it has gradient and state."""
    found: SharedParameter | None = _shared.get(parameter)
    return found


def steps_here(parameter: Tensor) -> bool:
    """Says whether an optimizer of this rank steps over a parameter."""
    if isinstance(parameter, RemoteTensor):
        return False
    shared = shared_parameter(parameter)
    return shared is None or shared.owner == shared.world.rank


def register_shared_parameters(state: OwnedState, placement: Placement, world: World, device: torch.device) -> None:
    """Registers the parameters of a split model whose optimizer state is shared out."""
    for name, parameter in state.parameters().items():
        ranks = placement.ranks_of(name)
        if name in placement.owners and world.rank in ranks:
            home = Home(f"the gradient of {name}", (placement.owners[name],), world.rank, device, parameter.shape)
            _shared[parameter] = SharedParameter(home, ranks, world)


def show_gradients_of_owners(parameters: Iterable[nn.Parameter]) -> None:
    """Shows the gradients that other ranks have, of those parameters that are shared out and trained."""
    for parameter in parameters:
        shared = shared_parameter(parameter)
        if shared is not None and parameter.requires_grad and parameter.grad is None:
            if shared.gradient is None:
                shared.gradient = RemoteGradient.of(parameter, shared.home)
            parameter.grad = shared.gradient


def spread_steps(parameters: Iterable[Tensor]) -> None:
    """Gives the numbers of shared parameters, listed alike on every rank, from their owners to all. Collective."""
    sums: GradientSums | None = None
    for parameter in parameters:
        shared = shared_parameter(parameter)
        if shared is not None:
            sums = sums or GradientSums(shared.world, gathers=True)
            own = parameter.detach()
            sums.add(own, shared.ranks, is_contiguous=own.is_contiguous(), owner=shared.owner)
            if shared.owner != shared.world.rank:
                increment_version(parameter)
    if sums is not None:
        with torch.no_grad():
            sums.finish()
