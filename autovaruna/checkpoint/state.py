"""The state of a run by name: model, optimizer, and everything else; and which rank writes what of it.

`ModelInTraining` is what a checkpoint is of; `compose` turns it into this rank's `RankState`: files, and documents for
``state.json``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.checkpoint.encoding import Json, decode, encode
from autovaruna.checkpoint.tensor_file import Reader, Rows, lay_out
from autovaruna.errors import CheckpointError
from autovaruna.ranks.world import World
from autovaruna.runtime.optimizer import OWNERSHIP, CutOptimizer
from autovaruna.runtime.weights import OwnedState, Placement


@dataclass(frozen=True)
class ModelInTraining:
    """A model in training, as this rank sees it."""

    world: World
    state: OwnedState
    placement: Placement | None = None  # who holds which; None while every rank has the whole model as it built it
    optimizer: CutOptimizer | None = None
    seed: int | None = None  # what random nodes are seeded from; None: not known yet
    num_calls: int = 0  # of the model, so far

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.state.model

    def entries(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the model's ``state_dict``: its tensors, on ``meta`` those of other ranks, and what modules add."""
        tensors: dict[str, Tensor] = {}
        others: dict[str, Any] = {}
        for name, value in self.state.entries().items():
            (tensors if name in self.state.first_name else others)[name] = value
        return tensors, others

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors among the `entries`."""
        return self.entries()[0]

    def first(self, name: str) -> str:
        """Returns the first of the names that a tensor has in the model."""
        return self.state.first_name.get(name, name)

    def saved_names(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Returns the name under which each of the given `tensors()` is saved.

        Tied tensors are saved once, by the first of their names. A name that the library transformers ties to another
        is not the one.
        """
        tied_by_hand = getattr(self.model, "_tied_weights_keys", None) or ()
        names = sorted(tensors, key=lambda name: name in tied_by_hand)  # keeps the order otherwise
        chosen: dict[str, str] = {}
        for name in names:
            chosen.setdefault(self.first(name), name)
        return {name: chosen[self.first(name)] for name in tensors}


@dataclass(frozen=True)
class Content:
    """What goes into a checkpoint beside model and optimizer."""

    step: int
    data_position: Any = None  # where the data go on
    extra: Any = None  # the user's own dict
    scaler: Any = None
    lr_scheduler: Any = None
    generators: Mapping[str, Tensor] | None = None  # those that a plain model draws from; None: as they are now


@dataclass(frozen=True)
class RankState:
    """What one rank writes."""

    files: Mapping[str, Rows]  # the bytes of its files, by name
    documents: Mapping[str, Json]  # its part of ``state.json``
    weights: Mapping[str, str]  # the file of each of the model's tensors among them, by name
    num_weight_bytes: int


def compose(subject: ModelInTraining, content: Content, is_shared: bool) -> RankState:
    """Returns the part of this rank; CheckpointError for tensors without numbers, and types that no part can hold."""
    rank = subject.world.rank
    tensors, module_state = subject.entries()
    writer = writers(subject, tensors, is_shared)
    weights = {name: tensors[name] for name, its_writer in writer.items() if its_writer == rank}
    if empty := [name for name, tensor in weights.items() if tensor.is_meta]:
        raise CheckpointError(
            f"{empty[0]} and {len(empty) - 1} others are on meta, where tensors have no numbers: got save_checkpoint "
            "before the first call, which gives them some. Call the model first, or load weights."
        )
    others: dict[str, Tensor] = {}
    generators = content.generators or generator_states()
    documents: dict[str, Any] = {"generators": {str(rank): encode(generators, f"rng.{rank}", others)}}
    if subject.optimizer is not None:
        documents |= _of_optimizer(subject, subject.optimizer, writer, others)
    if rank == 0:
        documents |= _of_first_rank(subject, content, others)
        documents["ties"] = {name: first for name, first in subject.saved_names(tensors).items() if name != first}
        documents["module_state"] = encode(module_state, "module_state", others)
    writing = sorted(set(writer.values()) or {0})
    place = writing.index(rank) + 1 if rank in writing else 0
    file = f"model-{place:05d}-of-{len(writing):05d}.safetensors"
    files = {file: weights, f"state-{rank + 1:05d}-of-{subject.world.num_ranks:05d}.safetensors": others}
    rows = {name: lay_out(its_tensors) for name, its_tensors in files.items() if its_tensors}
    return RankState(rows, documents, dict.fromkeys(weights, file), sum(each.nbytes for each in weights.values()))


def writers(subject: ModelInTraining, tensors: Mapping[str, Tensor], is_shared: bool) -> dict[str, int]:
    """Returns the rank that writes each tensor that is saved; the same on every rank.

    If `is_shared`, the replicas of a stage divide its parameters among them by bytes; else the first of them writes
    all. Buffers are always those of the first; what has an owner is the owner's.
    """
    saved = dict.fromkeys(subject.saved_names(tensors).values())
    if subject.placement is None:
        return dict.fromkeys(saved, 0)
    load = [0] * subject.world.num_ranks
    found: dict[str, int] = {}
    sizes = {name: tensors[name].shape.numel() * tensors[name].dtype.itemsize for name in saved}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        holders = subject.placement.steppers_of(subject.first(name))
        is_divided = is_shared and isinstance(subject.state.tensor(subject.first(name)), nn.Parameter)
        found[name] = min(holders, key=lambda rank: (load[rank], rank)) if is_divided else holders[0]
        load[found[name]] += sizes[name]
    return found


def _of_first_rank(subject: ModelInTraining, content: Content, others: dict[str, Tensor]) -> dict[str, Any]:
    """Returns what is the same on every rank, beside the model."""
    found: dict[str, Any] = {
        "step": content.step,
        "data_position": encode(content.data_position, "data_position", others),
        "extra": encode(content.extra, "extra", others),
        "seed": subject.seed,
        "num_calls": subject.num_calls,
    }
    for name, part in (("scaler", content.scaler), ("lr_scheduler", content.lr_scheduler)):
        if part is not None:
            found[name] = encode(part.state_dict(), name, others)
    return found


def generator_states() -> dict[str, Tensor]:
    """Returns the states of the generators that a plain model draws from on this rank."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def config_files(model: Any) -> dict[str, bytes]:
    """Returns ``config.json`` and the like, if the model has such a configuration."""
    found: dict[str, bytes] = {}
    for name in ("config", "generation_config"):
        save = getattr(getattr(model, name, None), "save_pretrained", None)
        if callable(save):
            with tempfile.TemporaryDirectory(prefix="autovaruna-") as directory:
                save(directory)
                found |= {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.is_file()}
    return found


def _of_optimizer(
    subject: ModelInTraining, optimizer: CutOptimizer, writer: Mapping[str, int], others: dict[str, Tensor]
) -> dict[str, Any]:
    """Returns the state of the parameters that this rank writes; of rank 0 class and groups, too, by names."""
    rank, own = subject.world.rank, optimizer.own_state()
    optimizer.check()
    writes = {subject.first(name): its_writer for name, its_writer in writer.items()}
    places = [place for group in own["param_groups"] for place in group["params"]]
    state = {
        name: encode(own["state"][place], f"optimizer.state.{name}", others)
        for place, name in zip(places, _own_names(optimizer, subject.state), strict=True)
        if place in own["state"] and writes.get(name, 0) == rank
    }
    if rank > 0:
        return {"optimizer_state": state}
    groups = []
    for index, (group, names) in enumerate(zip(own["param_groups"], optimizer.names, strict=True)):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**encode(options, f"optimizer.param_groups.{index}", others), "params": list(names)})
    return {
        "optimizer_state": state,
        "optimizer": {"class": type(optimizer.optimizer).__name__, "param_groups": groups},
    }


def check_optimizer(subject: ModelInTraining, optimizer: CutOptimizer, known: Mapping[str, Any]) -> list[str]:
    """Returns in words why the saved state of an optimizer does not fit this one."""
    optimizer.check()
    name = type(optimizer.optimizer).__name__
    if known["class"] != name:
        return [f"the optimizer is {known['class']}, expected {name}"]
    got = [{subject.first(each) for each in group["params"]} for group in known["param_groups"]]
    expected = [set(group) for group in optimizer.names]
    sizes, its_sizes = list(map(len, got)), list(map(len, expected))
    if sizes != its_sizes:
        return [f"the optimizer has groups of {sizes} parameters, expected {its_sizes}"]
    return [
        f"group {index} of the optimizer has {', '.join(sorted(found - wanted)[:3])}, expected "
        f"{', '.join(sorted(wanted - found)[:3])}"
        for index, (found, wanted) in enumerate(zip(got, expected, strict=True))
        if found != wanted
    ]


def load_optimizer(
    subject: ModelInTraining,
    optimizer: CutOptimizer,
    known: Mapping[str, Any],
    state: Mapping[str, Json],
    reader: Reader,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Gives an optimizer the saved options of its groups, and state, in its memory, of what this rank holds."""
    by_first = {subject.first(name): content for name, content in state.items()}
    own: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    every = _own_names(optimizer, subject.state)
    names = iter(every)
    for given, group in zip(known["param_groups"], optimizer.optimizer.param_groups, strict=True):
        options = decode({key: value for key, value in given.items() if key != "params"}, reader.tensor)
        start, parameters = sum(len(each["params"]) for each in groups), OWNERSHIP.own(group["params"])
        for place, parameter in enumerate(parameters, start):
            name = next(names)
            if name in by_first:
                now = optimizer.optimizer.state.get(parameter, {})
                own[place] = _decode_state(by_first[name], now, parameter, reader)
        groups.append({**options, "params": list(range(start, start + len(parameters)))})
    reader.fill()
    optimizer.load_own({"state": own, "param_groups": groups})
    _keep_dtypes(optimizer.optimizer, own, [dtypes.get(name) for name in every])


def _decode_state(given: Json, now: Mapping[str, Any], parameter: Tensor, reader: Reader) -> Any:
    """Returns the state of a parameter, in the memory of what it has now where that fits."""
    places = {
        value["$tensor"]: now.get(key) for key, value in given.items() if isinstance(value, dict) and "$tensor" in value
    }
    return decode(given, lambda name: reader.tensor(name, places.get(name), parameter))


def _keep_dtypes(optimizer: Any, own: Mapping[int, Any], saved: Sequence[torch.dtype | None]) -> None:
    """Undoes casts of state tensors to the dtype of their parameters, but of those that had it when saved."""
    parameters = [parameter for group in optimizer.param_groups for parameter in OWNERSHIP.own(group["params"])]
    for place, content in own.items():
        now = optimizer.state[parameters[place]]
        for key, value in content.items():
            is_cast = isinstance(value, Tensor) and isinstance(now.get(key), Tensor) and now[key].dtype != value.dtype
            if is_cast and value.dtype != saved[place]:
                now[key] = value.to(now[key].device)


def _own_names(optimizer: CutOptimizer, state: OwnedState) -> list[str]:
    """Returns the first names of this rank's parameters in the groups as they are now, in order."""
    names = {id(state.tensor(name)): name for name in state.places}
    own = [names.get(id(each)) for group in optimizer.optimizer.param_groups for each in OWNERSHIP.own(group["params"])]
    if None in own:
        raise CheckpointError(
            "The optimizer has parameters that are not the model's (any more): make it from model.parameters() after "
            "the last change of the model."
        )
    return [name for name in own if name is not None]
