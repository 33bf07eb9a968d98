"""Holds that a file, whatever is in it, is read, or refused in a sentence: nothing else is ever raised.

`WHOLE` runs 5,000 inputs, else some hundreds; each has a seed of its own, which a failure names.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autovaruna import AutoVaruna, load_checkpoint, log
from autovaruna.checkpoint.manifest import INDEX, MANIFEST, STATE, _own_checksum
from autovaruna.commands.trace import read_bars, summary
from autovaruna.config.files import PACKAGED
from autovaruna.config.settings import Settings, resolve
from autovaruna.elastic.host_list import list_hosts
from autovaruna.elastic.options import read_variables
from autovaruna.errors import AutoVarunaError, ConfigError
from autovaruna.graph.call import describe
from autovaruna.graph.trace import trace
from autovaruna.planner.deployment import Fingerprint, deployment_of, read_saved_plan, save
from autovaruna.planner.records import UNKNOWN_LINK
from autovaruna.planner.search import make_plan
from autovaruna.profiler.cache import ProfileCache
from autovaruna.profiler.measure import measure, parts_by_key, to_profile
from autovaruna.profiler.records import Cluster
from autovaruna.profiler.roofline import read_device
from autovaruna.varuna.profiler import AutoConfig, Facts, ProfileFolder
from tests.checkpoint.test_damage import forge
from tests.planner.cases import make_problem
from tests.products import WHOLE

NUM_INPUTS = 5000 if WHOLE else 500
VALUES: list[Any] = [
    None, True, -1, 0, 1, 7, 1.5, -0.0, 1e308, float("nan"), float("inf"), 10**19, 10**400, -(10**400), "", "x", "0",
    "~nosuchuser/a", "\0", "\ud800", "é" * 70, "9" * 400, "load", "auto", [], {}, [[]], [None], {"": None}, {"a": 1},
    {"$tensor": "nowhere"}, {"$dtype": "load"}, {"$dtype": "float32"}, {"$device": "moon"}, {"$bytes": 3},
    {"$bytes": "a"}, {"$float": "x"}, {"$tuple": 3}, {"$dict": [1]}, {"$dict": [[[], 1]]}, {"$set": [[]]},
    {"$array": 3}, {"$complex": [1, 2, 3]}, {"$counter": [[1, "x"]]}, {"$none": 1},
]  # fmt: skip
TOML = (
    "1", "-1", "1.5", "nan", "inf", "1e308", "9" * 400, "9" * 5000, "''", "'x'", "'~nosuchuser/a'", "'auto'", "[]",
    "{}", "[[0]]", "[" * 9000,
    "true", "1979-05-27", "'\\u0000'", "\"\\u0000\"", "[[-1]]", f"[[{'9' * 400}]]", "{a = 1}", "'1e99GiB'", "",
)  # fmt: skip
BYTES = (b"", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"\xff\xfe", b"null", b"[]", b"{}", b'"x"', b"\0" * 64)


@dataclass
class Reader:
    """A file with something in it that is right, and what reads it."""

    file: Path
    read: Callable[[], object]
    sign: Callable[[bytes], object] | None = None  # writes other bytes, and makes the checksum of another file fit

    def __post_init__(self) -> None:
        self.right = self.file.read_bytes()
        self.read()

    def try_one(self, seed: int) -> None:
        """Reads one damaged file; afterwards the right one is there again."""
        data = damaged(self.right, random.Random(seed))
        (self.sign or self.file.write_bytes)(data)
        try:
            self.read()
        except AutoVarunaError as error:
            assert len(str(error)) < 3000, f"seed {seed} of {self.file.name}: {len(str(error))} characters"
        except BaseException as error:
            raise AssertionError(f"seed {seed} of {self.file}: {type(error).__name__}: {error}") from error
        finally:
            (self.sign or self.file.write_bytes)(self.right)


def damaged(data: bytes, draw: random.Random) -> bytes:
    kind = draw.randrange(10)
    if kind == 0:
        return draw.choice(BYTES)
    if kind == 1:
        start = draw.randrange(len(data) + 1)
        return data[:start] + draw.choice((b"", draw.choice(BYTES), draw.randbytes(3), data[start + 3 :]))
    if kind == 2:
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(flipped)
    if data[8:9] == b"{" and b"\0" in data[:8]:  # the header of a safetensors file
        end = 8 + int.from_bytes(data[:8], "little")
        header = changed_json(data[8:end], draw)
        return len(header).to_bytes(8, "little") + header + data[end:]
    return changed_json(data, draw) if data[:1] == b"{" else changed_lines(data, draw)


def changed_json(data: bytes, draw: random.Random) -> bytes:
    """Returns JSON with another value somewhere, or one that is missing, or one too many; without its checksum."""
    content = json.loads(data)
    if isinstance(content, dict):
        content.pop("checksum", None)
    for _ in range(draw.choice((1, 1, 3))):
        parent, key = draw.choice(list(places(content)) or [({}, "")])
        how = draw.randrange(8)
        if how == 0 and key in range(len(parent)) if isinstance(parent, list) else how == 0:
            parent.pop(key, None) if isinstance(parent, dict) else parent.pop(key)
        elif how == 1:
            parent.update(more=1) if isinstance(parent, dict) else parent.append(parent[0])
        else:
            parent[key] = copy.deepcopy(draw.choice(VALUES))
    return json.dumps(content).encode()


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each place of a value: what it is in, and its key there."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(items):
        yield content, key
        yield from places(value)


def changed_lines(data: bytes, draw: random.Random) -> bytes:
    """Returns a text with a line that says something else."""
    lines = data.decode().splitlines()
    place = draw.randrange(len(lines))
    name, equals, _ = lines[place].partition("=")
    if lines[place].startswith("{"):  # a line of a trace
        lines[place] = changed_json(lines[place].rstrip(",").encode(), draw).decode() + ","
    elif equals:
        lines[place] = f"{name}= {draw.choice(TOML)}"
    else:
        lines[place] = draw.choice((*TOML, "[levels", "a:b", "-x", "a b", ":", "$(id)", "é", "A" * 5000))
    return "\n".join(lines).encode()


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Reader]]:
    """Returns all readers of files that there are."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("files")
        conf = root / "conf"
        conf.mkdir()
        patch.setenv("AUTOVARUNA_CONF_DIR", str(conf))
        yield [*settings(conf), *plans(root), *profiles(root), *checkpoints(root), *others(root)]


def settings(conf: Path) -> list[Reader]:
    (conf / "conf.toml").write_text((PACKAGED / "conf.toml").read_text())
    (conf / "logging.toml").write_text((PACKAGED / "logging.toml").read_text())
    (conf / "devices").mkdir()
    (conf / "devices" / "own.toml").write_text((PACKAGED / "devices" / "h100.toml").read_text())
    return [
        Reader(conf / "conf.toml", lambda: resolve({})),
        Reader(conf / "logging.toml", log.configure),
        Reader(conf / "devices" / "own.toml", lambda: read_device("own")),
    ]


def plans(root: Path) -> list[Reader]:
    problem = make_problem(8, 3, 12, num_stages=3)
    memory = problem.cluster.memory_bytes
    fingerprint = Fingerprint("abc", {"global batch": "12"}, 3, (3,), "cpu", memory, {"optimizer_bytes_factor": 2.0})
    file = root / "deployment.json"
    save(file, deployment_of(make_plan(problem), problem.graph, fingerprint))
    settings = Settings(deployment_file=str(file), load_deployment=True)

    def plan_again() -> None:
        """Takes it, or says that the model is planned again."""
        try:
            read_saved_plan(replace(settings, load_deployment="auto"), fingerprint, problem.graph)
        except AutoVarunaError as error:
            raise AssertionError("the saved plan is only a shortcut") from error

    return [Reader(file, lambda: read_saved_plan(settings, fingerprint, problem.graph)), Reader(file, plan_again)]


def profiles(root: Path) -> list[Reader]:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    _, call = describe(model, (torch.ones(2, 3),), {}, ())
    traced = trace(model, call, torch.device("cpu"))
    costs = measure(traced, model, [1, 2], torch.device("cpu"), iterations=1)
    cluster = Cluster(("a", "a"), (1e9, 1e9), (1.0, 1.0), UNKNOWN_LINK, UNKNOWN_LINK, 1e9)
    folder, key = ProfileFolder(root / "profiles"), next(iter(costs))
    folder.write(graph=traced.graph, cluster=cluster, facts=Facts(2, 2.0))
    folder.write(profile=to_profile(traced, costs, torch.device("cpu")))
    cache = ProfileCache(root / "cache", {"device": "cpu"}, 1)
    cache.write({key: costs[key]})
    parts = {key: parts_by_key(traced, [1, 2])[key]}

    def plan() -> object:
        return AutoConfig(2, 4, folder.path, cutpoints="ignore").best

    names = ("profile", "graph", "cluster", "facts")
    return [
        *(Reader(folder.path / f"{name}.json", plan) for name in names),
        Reader(cache._path(key), lambda: to_profile(traced, {**costs, **cache.read(parts)}, torch.device("cpu"))),
    ]


def checkpoints(root: Path) -> list[Reader]:
    torch.manual_seed(0)

    def made() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.1}])
        parts = {"scaler": torch.amp.GradScaler("cpu"), "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
        return model, optimizer, parts

    model, optimizer, parts = made()
    wrapped = AutoVaruna(model, optimizer)
    wrapped(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    extra = {"a": (1, b"x", {2: 3j}), "b": torch.ones(2), "c": {1.5}, "d": torch.float32, "e": torch.device("cpu")}
    wrapped.save_checkpoint(root / "saved", step=1, data_position={"batch": 3}, extra=extra, **parts)
    folder, generator = root / "saved" / "step-00000001", torch.get_rng_state()

    def read() -> None:
        model, optimizer, parts = made()
        try:
            load_checkpoint(folder, model, optimizer, **parts)
        finally:
            torch.set_rng_state(generator)

    def signing(name: str) -> Callable[[bytes], object]:
        return lambda data: forge(folder, name, data)

    weights = next(each.name for each in folder.glob("model-*.safetensors"))
    names = (STATE, STATE, INDEX, weights)
    manifest = Reader(folder / MANIFEST, read, lambda data: (folder / MANIFEST).write_bytes(signed(data)))
    return [*(Reader(folder / name, read, signing(name)) for name in names), manifest]


def signed(manifest: bytes) -> bytes:
    """Returns a manifest with the checksum that it must have, where that can be."""
    try:
        content = json.loads(manifest)
        content.pop("checksum", None)
        return json.dumps({"checksum": _own_checksum(content), **content}).encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        return manifest


def others(root: Path) -> list[Reader]:
    place = {"pid": 0, "tid": 1, "ts": 1.5, "dur": 2.0, "args": {"step": 1}}
    rows = [{"ph": "M", "name": "thread_name", "args": {}}, {"ph": "X", "name": "3F1", **place}]
    rows.append({"ph": "X", "name": "wait", **place, "pid": 1})
    (root / "trace.json").write_text("[\n" + "".join(json.dumps(row) + ",\n" for row in rows))
    (root / "machines").write_text("a\nlocalhost # this\n10.0.0.1\n")
    (root / "env").write_text("export A='b c'\nB=1\n# nothing\n")
    return [
        Reader(root / "trace.json", lambda: summary(read_bars(root / "trace.json"))),
        Reader(root / "machines", lambda: list_hosts(str(root / "machines"), 2, None)),
        Reader(root / "env", lambda: read_variables(str(root / "env"))),
    ]


def test_a_hostile_file_is_read_or_refused_in_a_sentence(readers: list[Reader]) -> None:
    for seed in range(NUM_INPUTS):
        readers[seed % len(readers)].try_one(seed)


def test_variables_and_places_are_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    draw = random.Random(0)
    names = sorted(each.upper() for each in resolve({}, {"HOME": "/"}).as_dict())
    for _ in range(NUM_INPUTS // 5):
        text = draw.choice([*(str(value) for value in VALUES), *TOML, "[" * 9000, '{"0": [0]}'])
        environ = {"HOME": "/", f"AUTOVARUNA_{draw.choice(names)}": text}
        try:
            resolve({}, environ)
        except ConfigError as error:
            assert len(str(error)) < 3000
    (tmp_path / "file").touch()
    for named in ("~nosuchuser", "\0", "a" * 300, str(tmp_path / "file" / "below")):
        with pytest.raises(ConfigError, match="AUTOVARUNA_CONF_DIR"):
            resolve({}, {"AUTOVARUNA_CONF_DIR": named})
