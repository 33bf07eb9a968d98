"""Holds what the cache of measured costs promises: nothing twice, nothing of another machine, no error from a file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.config.settings import resolve
from autovaruna.profiler.bytes import Bytes, Made
from autovaruna.profiler.cache import LinkCache, ProfileCache, cache_of, environment
from autovaruna.profiler.measure import Key, PartCost, lasting_parts, measure, parts_by_key, to_profile
from autovaruna.profiler.records import LinkCost
from autovaruna.profiler.work import layer_parts
from tests.catalogue import PLAIN
from tests.catalogue.small import Written
from tests.products import some
from tests.profiler.models import CPU, WIDTH, Mlp, profile, traced, traced_case

COST = PartCost(0.5, 0.25, Bytes(7, ((0, 8), (2, 16)), (Made(1, 24, True),), 5, 9))
KEY: Key = ("abc", 4)
PART: Any = SimpleNamespace(values=("a", "b", "c"), outputs=("d", "e"))
PARTS: dict[Key, Any] = {KEY: PART}


def cache(directory: Path, iterations: int = 5, **more: object) -> ProfileCache:
    return ProfileCache(directory, {"device": "test", **more}, iterations)


def unsigned(text: str, **changes: Any) -> str:
    content = {**json.loads(text), **changes}
    del content["checksum"]
    return json.dumps(content)


def measured(model: nn.Module, known: dict[Key, PartCost], *args: Tensor) -> dict[Key, PartCost]:
    return measure(traced(model, *args), model, [2], CPU, iterations=1, known=known)


def test_what_is_written_is_read_again_but_for_another_environment_or_more_samples(tmp_path: Path) -> None:
    cache(tmp_path).write({KEY: COST})
    assert cache(tmp_path).read({KEY: PART, ("other", 4): PART, ("abc", 8): PART}) == {KEY: COST}
    cache(tmp_path, 3).write({KEY: COST})
    assert cache(tmp_path, 2).read(PARTS) and cache(tmp_path, 3).read(PARTS)
    assert not cache(tmp_path, 4).read(PARTS)
    assert not cache(tmp_path, 3, torch="9").read(PARTS)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: text.replace('"forward_seconds": 0.5', '"forward_seconds": -1'),
        lambda text: text.replace('"forward_seconds": 0.5', '"forward_seconds": NaN'),
        lambda text: text.replace('"inside"', '"outside"'),
        lambda text: text.replace('"iterations": 5', '"iterations": "many"'),
        lambda text: text.replace('"forward_seconds": 0.5', '"forward_seconds": 0.6'),
        lambda text: unsigned(text, signature="other"),
        lambda text: unsigned(text, micro_batch_size=8),
    ],
)
def test_a_damaged_file_is_a_warning_and_is_written_again(tmp_path: Path, caplog, damage) -> None:
    cache(tmp_path).write({KEY: COST})
    path = next(tmp_path.glob("*/*.json"))
    text = path.read_text()
    path.write_text(damage(text))
    assert path.read_text() != text
    assert cache(tmp_path).read(PARTS) == {}
    assert str(path) in caplog.text and "measuring again" in caplog.text
    cache(tmp_path).write({KEY: COST})
    assert cache(tmp_path).read(PARTS) == {KEY: COST}


def test_a_second_model_with_the_same_blocks_measures_nothing() -> None:
    """Neither another number of layers, nor another batch size of the call, nor other names of modules matter."""
    renamed = Written(lambda self, x: self.renamed(x).square().mean(), renamed=nn.Sequential())
    for layer in Mlp(14).layers:
        renamed.get_submodule("renamed").extend([layer, nn.ReLU()])
    known = measured(Mlp(14), {}, torch.zeros(3, WIDTH))
    assert known and not measured(Mlp(14), known, torch.zeros(5, WIDTH))
    assert not measured(renamed, known, torch.zeros(3, WIDTH))
    layers = {(part.signature, 2) for part in layer_parts(traced(Mlp(28), torch.zeros(3, WIDTH)))}
    assert measured(Mlp(28), known, torch.zeros(3, WIDTH)).keys() <= layers, "runs of layers end elsewhere"


def step(dtype: torch.dtype = torch.float32, frozen: bool = False, p: float = 0.0) -> nn.Module:
    """Returns a model of one operation whose cost may differ."""
    linear = nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(not frozen)
    return Written(lambda self, x: self.drop(self.linear(x)).square().mean(), linear=linear, drop=nn.Dropout(p))


def signatures(model: nn.Module, x: Tensor) -> set[str]:
    return {signature for signature, _ in lasting_parts(traced(model, x), [2])}


def test_whatever_changes_the_time_changes_the_signature() -> None:
    x = torch.zeros(3, 4, WIDTH)
    usual = signatures(step(), x)
    assert usual == signatures(step(), torch.zeros(6, 4, WIDTH))
    assert not usual & signatures(step(), torch.zeros(3, 5, WIDTH))
    assert not usual & signatures(step(torch.float64), x.double())
    assert usual != signatures(step(frozen=True), x)
    assert usual != signatures(step(p=0.5), x) != signatures(step(p=0.5).eval(), x)
    assert usual != signatures(step(), x.transpose(1, 2).contiguous().transpose(1, 2).clone().requires_grad_())
    with torch.no_grad():
        assert not usual & signatures(step(), x)


def test_operators_of_other_libraries_are_measured_each_time() -> None:
    @torch.library.custom_op("autovaruna_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: grad * 2)

    model = Written(lambda self, x: self.mlp(twice(self.mlp.layers[0](x))), mlp=Mlp(2))
    graph = traced(model, torch.zeros(3, WIDTH))
    every = measure(graph, model, [2], CPU, iterations=1).keys()
    left_out = every - set(lasting_parts(graph, [2]))
    assert left_out and left_out < every


def test_a_profile_from_the_cache_is_the_profile_that_was_measured(tmp_path: Path) -> None:
    model, graph, tensors = traced_case("moving_average", 3)
    costs = measure(graph, model, [2], CPU, iterations=1, inputs=tensors)
    cache(tmp_path, 1).write(costs)
    known = cache(tmp_path, 1).read(lasting_parts(graph, [2]))
    assert known == costs
    assert profile(graph, model, [2], known=known) == profile(graph, model, [2], known=costs)


def test_the_setting_says_where_costs_are_kept(tmp_path: Path) -> None:
    def place(value: object) -> Path | None:
        found = cache_of(resolve({"profile_cache": value}), CPU)
        return found and found.directory.parent

    assert place("auto") == place(True) == tmp_path / "profiles"
    assert place(str(tmp_path / "mine")) == tmp_path / "mine"
    assert place(False) is None


def test_the_environment_names_threads_and_neighbours() -> None:
    here = environment(CPU)
    assert "1 threads" in here["device"] and here["torch"] == torch.__version__
    assert environment(CPU, 4) != here


def test_every_cost_fits_a_part_or_is_measured_again() -> None:
    """Whatever part a saved cost is of, and under whatever name it lies, it ends no run."""
    names = [case.name for case in some(PLAIN, 6)]
    graphs = [(model, graph) for model, graph, _ in (traced_case(name, 3) for name in names)]
    known = [measure(graph, model, [2], CPU, iterations=1, budget_seconds=0.0) for model, graph in graphs]
    every = [cost for costs in known for cost in costs.values()]
    for (_, graph), own in zip(graphs, known, strict=True):
        parts = parts_by_key(graph, [2])
        for cost in every:
            fitting = {key: cost if cost.fits(part) else own[key] for key, part in parts.items()}
            assert to_profile(graph, fitting, CPU).costs
    parts = [part for _, graph in graphs for part in parts_by_key(graph, [2]).values()]
    assert {cost.fits(part) for cost in every for part in parts} == {True, False}


LINK = LinkCost(1e-3, 1e7)


def test_a_link_is_kept_by_its_name_and_a_damaged_one_is_measured_again(tmp_path: Path, caplog) -> None:
    LinkCache(tmp_path).write({"a b": LINK})
    assert LinkCache(tmp_path).read(["a b", "a c"]) == {"a b": LINK} and not caplog.messages
    path = next(tmp_path.glob("*/*.json"))
    path.write_text(unsigned(path.read_text(), name="a c"))
    assert LinkCache(tmp_path).read(["a b"]) == {}
    assert str(path) in caplog.text and "measuring again" in caplog.text


def test_a_link_is_kept_for_a_week_and_a_network_that_has_changed_is_told_of(tmp_path: Path, caplog) -> None:
    """Once, a kept link was kept for ever."""
    kept = LinkCache(tmp_path)
    kept.write({"a b": LINK, "a c": LINK})
    path, week = next(tmp_path.glob("*/*.json")), time.time() - 7 * 24 * 3600
    for age, count in ((60, 2), (-60, 1)):
        os.utime(path, (week + age, week + age))
        assert len(kept.read(["a b", "a c"])) == count and not caplog.messages
    kept.write(dict.fromkeys(("a b", "a c"), LinkCost(1e-3, 1.4e7)))
    assert len(kept.read(["a b", "a c"])) == 2 and not caplog.messages
    kept.write(dict.fromkeys(("a b", "a c"), LinkCost(1e-3, 1e6)))
    assert caplog.messages == [
        "the network has changed: a b carries 1e+06 bytes a second, 1.4e+07 when it was measured before"
    ]


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: cache(folder).write({KEY: COST, ("other", 1): COST}),
        lambda folder: LinkCache(folder).write({"a b": LINK, "a c": LINK}),
    ],
)
def test_a_directory_that_cannot_be_written_is_one_warning(write, tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    write(tmp_path / "file")
    assert len(caplog.messages) == 1 and "cannot be written" in caplog.text
