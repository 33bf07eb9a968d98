"""Takes an optimizer's state apart by parameter name, and puts this rank's part together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autovaruna.checkpoint.document import Json, decode, encode
from autovaruna.checkpoint.tensor_file import Reader
from autovaruna.errors import CheckpointError
from autovaruna.runtime.optimizers.optimizer import CutOptimizer, own_of
from autovaruna.runtime.weights.placement import OwnedState


def encode_groups(optimizer: CutOptimizer, own: Mapping[str, Any], tensors: dict[str, Tensor]) -> Json:
    """Returns class and groups of an optimizer, whose parameters are names; `own` is its `own_state()`.

    Raises:
        CheckpointError: an option of a group is of a type that no checkpoint can hold.
    """
    groups = []
    for index, (group, names) in enumerate(zip(own["param_groups"], optimizer.names, strict=True)):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**encode(options, f"optimizer.param_groups.{index}", tensors), "params": list(names)})
    return {"class": type(optimizer.optimizer).__name__, "param_groups": groups}


def encode_state(
    optimizer: CutOptimizer,
    own: Mapping[str, Any],
    state: OwnedState,
    wanted: Callable[[str], bool],
    tensors: dict[str, Tensor],
) -> dict[str, Json]:
    """Returns the state of the wanted parameters that this rank holds, by first name; `own` is its `own_state()`.

    Raises:
        CheckpointError: something in it is of a type that no checkpoint can hold.
    """
    optimizer.check()
    places = [place for group in own["param_groups"] for place in group["params"]]
    names = _own_names(optimizer, state)
    return {
        name: encode(own["state"][place], f"optimizer.state.{name}", tensors)
        for place, name in zip(places, names, strict=True)
        if place in own["state"] and wanted(name)
    }


def check_optimizer(optimizer: CutOptimizer, known: Mapping[str, Any], first_of: Callable[[str], str]) -> list[str]:
    """Returns in words why the saved state of an optimizer does not fit this one."""
    name = type(optimizer.optimizer).__name__
    if known["class"] != name:
        return [f"the optimizer is {known['class']}, expected {name}"]
    got = [{first_of(each) for each in group["params"]} for group in known["param_groups"]]
    expected = [set(group) for group in optimizer.names]
    if [len(group) for group in got] != [len(group) for group in expected]:
        return [
            f"the optimizer has groups of {[len(group) for group in got]} parameters, expected "
            f"{[len(group) for group in expected]}"
        ]
    odd = [
        f"group {index} of the optimizer has {', '.join(sorted(found - wanted)[:3])}, expected "
        f"{', '.join(sorted(wanted - found)[:3])}"
        for index, (found, wanted) in enumerate(zip(got, expected, strict=True))
        if found != wanted
    ]
    return odd


def load_optimizer(
    optimizer: CutOptimizer,
    weights: OwnedState,
    known: Mapping[str, Any],
    state: Mapping[str, Json],
    first_of: Callable[[str], str],
    reader: Reader,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Gives an optimizer the saved options of its groups, and the state of the parameters that this rank holds.

    State that it has is overwritten where it is, so that there is no second copy.
    """
    by_first = {first_of(name): content for name, content in state.items()}
    own: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    every = _own_names(optimizer, weights)
    names = iter(every)
    for given, group in zip(known["param_groups"], optimizer.optimizer.param_groups, strict=True):
        options = decode({key: value for key, value in given.items() if key != "params"}, reader.tensor)
        start, parameters = sum(len(each["params"]) for each in groups), own_of(group["params"])
        for place, parameter in enumerate(parameters, start):
            name = next(names)
            if name in by_first:
                own[place] = _decode_state(
                    by_first[name], optimizer.optimizer.state.get(parameter, {}), parameter, reader
                )
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
    """Undoes the cast of state tensors to the dtype of their parameters, which loses digits.

    What had the dtype of its parameter when it was saved has that of the parameter now.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in own_of(group["params"])]
    for place, content in own.items():
        now = optimizer.state[parameters[place]]
        for key, value in content.items():
            is_cast = isinstance(value, Tensor) and isinstance(now.get(key), Tensor) and now[key].dtype != value.dtype
            if is_cast and value.dtype != saved[place]:
                now[key] = value.to(now[key].device)


def _own_names(optimizer: CutOptimizer, state: OwnedState) -> list[str]:
    """Returns the first names of this rank's parameters in the groups as they are now, in order."""
    names = {id(state.tensor(name)): name for name in state.places}
    own = [names.get(id(each)) for group in optimizer.optimizer.param_groups for each in own_of(group["params"])]
    if None in own:
        raise CheckpointError(
            "The optimizer has parameters that are not the model's (any more): make it from model.parameters() after "
            "the last change of the model."
        )
    return [name for name in own if name is not None]
