"""Holds what the files are: weights that any tool of Hugging Face reads, state without pickle, values given back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna, CheckpointError, load_checkpoint
from autovaruna.checkpoint.encoding import decode, encode
from autovaruna.checkpoint.save import chunks_of, write_file
from autovaruna.checkpoint.tensor_file import NAMES, lay_out, read_header, read_new
from tests.catalogue import CASES
from tests.checkpoint.runs import OPTIMIZERS, SETUPS, save_halfway
from tests.reference import plain_steps
from tests.session.training import descend


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint of a GPT-2 in two stages, one of them on two ranks."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("gpt2")
    save_halfway(CASES["gpt2"], SETUPS["unequal"], OPTIMIZERS["adamw"], root)
    return root / "step-00000003"


def test_transformers_reads_the_folder(gpt2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(gpt2)
    ours = CASES["gpt2"].model(seed=2)
    load_checkpoint(gpt2, ours)
    expected = ours.state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, expected[name].cpu()), name
    assert theirs.lm_head.weight is theirs.transformer.wte.weight


def test_no_file_is_a_pickle_and_the_index_tells_of_each_weight_once(gpt2: Path) -> None:
    index = json.loads((gpt2 / "model.safetensors.index.json").read_text())
    sizes = {}
    for file in gpt2.iterdir():
        if file.suffix != ".safetensors":
            json.loads(file.read_text())
            continue
        for key, value in safetensors.torch.load_file(file).items():
            if file.name in index["weight_map"].values():
                sizes[key] = value.numel() * value.element_size()
                assert index["weight_map"][key] == file.name
    assert sizes.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert "lm_head.weight" not in sizes and "transformer.wte.weight" in sizes


def test_replicas_share_the_writing(gpt2: Path, tmp_path: Path) -> None:
    sizes = [each.stat().st_size for each in sorted(gpt2.glob("model-*-of-00003.safetensors"))]
    assert len(sizes) == 3 and max(sizes[1:]) < 1.6 * min(sizes[1:])
    save_halfway(CASES["chain"], SETUPS["unequal"], OPTIMIZERS["adamw"], tmp_path, shard=False)
    assert len(list(tmp_path.glob("*/model-*-of-00002.safetensors"))) == 2


def test_plain_pytorch_goes_on_with_its_dropout(tmp_path: Path) -> None:
    case = CASES["dropout"]

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[Tensor]:
        batches = [case.batch(7, step) for step in (first, first + 1)]
        return plain_steps(case, batches, lambda _: optimizer, model=model).losses

    plain, other = case.model(), case.model(1)
    optimizer, its_optimizer = OPTIMIZERS["adamw"](plain.parameters()), OPTIMIZERS["adamw"](other.parameters())
    wrapped = AutoVaruna(plain, optimizer)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)
    steps(wrapped, optimizer, 0)
    schedule.step()
    wrapped.save_checkpoint(tmp_path, step=2, lr_scheduler=schedule)
    expected = steps(wrapped, optimizer, 2)
    its_schedule = torch.optim.lr_scheduler.MultiStepLR(its_optimizer, [1, 3], 0.5)
    load_checkpoint(tmp_path, other, its_optimizer, lr_scheduler=its_schedule)
    assert its_optimizer.param_groups[0]["lr"] == 0.5e-3 and its_schedule.last_epoch == 1
    assert steps(other, its_optimizer, 2) == expected


class Headed(nn.Module):
    """A base model with a head, as those of the library transformers are."""

    base_model_prefix = "base"

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.base[0].weight


@pytest.mark.parametrize("kind", ["state_dict", "save_model", "folder"])
def test_loads_what_others_wrote(kind: str, tmp_path: Path) -> None:
    net, other = Headed(), Headed()
    path = tmp_path / "model.safetensors"
    if kind == "state_dict":
        safetensors.torch.save_file({name: value.clone() for name, value in net.state_dict().items()}, path)
    else:
        safetensors.torch.save_model(net, str(path))
    info = load_checkpoint(tmp_path if kind == "folder" else path, other)
    assert info.step is None
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())


def test_what_does_not_fit_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    state = {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(2, dtype=torch.int64), "more": torch.ones(1)}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "x.safetensors", net)
    for words in ("0.weight has shape (3, 2)", "torch.int64", "missing: 1.weight, 1.bias", "not expected: more"):
        assert words in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    AutoVaruna(net, torch.optim.SGD(net.parameters())).save_checkpoint(tmp_path, step=0)
    with pytest.raises(CheckpointError, match="the optimizer is SGD, expected Adam"):
        load_checkpoint(tmp_path, net, torch.optim.Adam(net.parameters()))
    groups = [{"params": [parameter]} for parameter in net.parameters()]
    with pytest.raises(CheckpointError, match=r"groups of \[2\] parameters, expected \[1, 1\]"):
        load_checkpoint(tmp_path, net, torch.optim.SGD(groups))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_model_of_another_precision_takes_the_numbers_rounded_and_trains(
    dtypes: tuple[torch.dtype, torch.dtype], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trained(dtype: torch.dtype, seed: int) -> tuple[AutoVaruna, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(dtype)
        net[0].weight.data = net[0].weight.data.t().contiguous().t()  # not in one row
        optimizer = torch.optim.Adam(net.parameters())
        model = AutoVaruna(net, optimizer)
        model(torch.randn(4, 4, dtype=dtype)).sum().backward()
        optimizer.step()
        return model, optimizer

    (saved, its), (model, optimizer) = trained(dtypes[0], 0), trained(dtypes[1], 1)
    saved.save_checkpoint(tmp_path, step=1)
    model.load_checkpoint(tmp_path)
    assert f"weights of {dtypes[0]} become" in caplog.text
    for name, value in saved.state_dict().items():
        got = model.state_dict()[name]
        assert got.dtype == (dtypes[1] if value.is_floating_point() else value.dtype)
        assert torch.equal(got, value.to(got.dtype)), name
    for parameter, other in zip(saved.parameters(), model.parameters(), strict=True):
        now = optimizer.state[other]["exp_avg"]
        assert now.dtype == dtypes[1] and torch.equal(now, its.state[parameter]["exp_avg"].to(dtypes[1]))
    optimizer.step()


@pytest.mark.parametrize(
    ("names", "model", "is_strict", "words"),
    [
        (["module.weight", "module.bias"], nn.Linear(2, 2), True, r"it has 'module\.' in front of each name"),
        (["weight", "bias"], nn.Sequential(nn.Linear(2, 2)), True, r"it lacks '0\.' in front of each name"),
        (["other"], nn.Linear(2, 2), False, "none of its names is one of the model's: got other"),
    ],
)
def test_others_names_are_told(names: list[str], model: nn.Module, is_strict: bool, words: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    safetensors.torch.save_file({name: torch.ones([2] * (1 + name.endswith("weight"))) for name in names}, file)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(file, model, strict=is_strict)


@pytest.mark.parametrize("is_file_headed", [True, False])
def test_weights_of_a_base_model_are_found(is_file_headed: bool, tmp_path: Path) -> None:
    """As in the library transformers: of a model in its base model, and of a base model in one with a head."""
    headed = Headed()
    base: Any = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))
    base.base_model_prefix = "base"
    source, target = (headed, base) if is_file_headed else (base, headed)
    state = {name: value for name, value in source.state_dict().items() if name != "head.weight"}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    load_checkpoint(tmp_path, target)
    assert all(map(torch.equal, headed.base.parameters(), base.parameters()))


def test_what_is_left_in_a_checkpoint_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    parts = {"scaler": torch.amp.GradScaler("cpu"), "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    model = AutoVaruna(net, optimizer)
    model.save_checkpoint(tmp_path / "all", step=0, **parts)
    AutoVaruna(net).save_checkpoint(tmp_path / "weights", step=0)
    model.load_checkpoint(tmp_path / "all", **parts)
    assert "loading" not in caplog.text
    model.load_checkpoint(tmp_path / "all")
    assert "give it scaler=" in caplog.text and "give it lr_scheduler=" in caplog.text
    model.load_checkpoint(tmp_path / "weights")
    assert "saved without an optimizer" in caplog.text


VALUES: dict[str, Any] = {
    "nested": {"a": [1, 2.5, None, True, "text", (1, (2,))], "b": {3: "three", (1, 2): "pair", "$x": 1}},
    "floats": [float("inf"), float("-inf"), 0.1, -0.0],
    "tensors": {"a": [torch.arange(3), {"b": torch.ones(2, 2, dtype=torch.bfloat16)}]},
    "bytes": b"\x00\xff",
    "large": 2**70,
    "generator": torch.Generator().get_state(),
    "numpy": np.random.RandomState(0).get_state(),
    "dtype": [torch.float16, torch.device("cpu")],
    "complex": [1 - 2j, complex("inf"), {(1j,): -0j}],
    "sets": [{1, "a", (2, 3j)}, frozenset({b"b"}), set(), {"$set": 1}],
    "numpy of others": [np.arange(3, dtype=">i4"), np.array([1j]), np.array(2.5, ">f8"), np.zeros((0, 2), bool)],
}


def same(got: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(got, expected) and got.dtype == expected.dtype
    if isinstance(expected, np.ndarray):
        return bool(np.array_equal(got, expected))
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same(got[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return type(got) is type(expected) and len(got) == len(expected) and all(map(same, got, expected))
    return type(got) is type(expected) and got == expected


def kept(value: Any) -> Any:
    """Returns what comes back of a value."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "extra", tensors), allow_nan=False)
    return decode(json.loads(text), tensors.__getitem__)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(name: str) -> None:
    assert same(kept(VALUES[name]), VALUES[name])


def test_numbers_of_numpy_become_those_of_python() -> None:
    """Once, ``accuracy > best`` of two such numbers was refused."""
    assert same(kept([np.bool_(True), np.float32(0.5), np.int8(3), np.complex64(1j)]), [True, 0.5, 3, 1j])


def test_what_cannot_be_kept_is_refused_by_its_path(tmp_path: Path) -> None:
    model = AutoVaruna(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"extra\.a\.1\.b is .* of type object"):
        model.save_checkpoint(tmp_path, step=0, extra={"a": [0, {"b": object()}]})
    assert not list(tmp_path.glob("*step-*"))


LACKING = (torch.complex64, torch.complex128, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e8m0fnu)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [*NAMES, *LACKING])
def test_each_dtype_comes_back_and_safetensors_reads_those_that_it_has(dtype: torch.dtype, tmp_path: Path) -> None:
    data = (torch.arange(48, dtype=torch.uint8) % (2 if dtype is torch.bool else 48)).view(dtype)
    tensors = {"a": data.reshape(3, -1), "b": data[0], "c": torch.empty(0, 2)}
    write_file(tmp_path / "x", chunks_of(lay_out(tensors)))
    found = safetensors.torch.load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    for name, entry in read_header(tmp_path / "x")[0].items():
        for each in [read_new(entry), *[found[name]] * (dtype not in LACKING)]:
            assert (each.dtype, each.shape) == (tensors[name].dtype, tensors[name].shape)
            assert torch.equal(*(value.reshape(-1).view(torch.uint8) for value in (each, tensors[name])))


def test_state_lies_in_memory_as_its_parameter_does(tmp_path: Path) -> None:
    """Fused kernels go through a parameter and its state in the order of memory, whatever their strides."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Conv2d(3, 5, 2)).to(memory_format=torch.channels_last)
        return net, torch.optim.AdamW(net.parameters(), fused=True)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(7)
        descend(net(torch.randn(2, 3, 4, 4)).square().mean(), optimizer)

    expected, found = made(0), made(1)
    train(*expected)
    AutoVaruna(*expected).save_checkpoint(tmp_path, step=1)
    load_checkpoint(tmp_path, *found)
    for both in (expected, found):
        train(*both)
    assert all(map(torch.equal, expected[0].parameters(), found[0].parameters()))


@pytest.mark.parametrize("is_equal", [True, False])
def test_numbers_left_out_of_a_tie_are_told(is_equal: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {name: value.clone() for name, value in Headed().state_dict().items()}
    state["head.weight"] += not is_equal
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    load_checkpoint(tmp_path / "x.safetensors", Headed())
    assert ("head.weight and base.0.weight have other numbers" in caplog.text) is not is_equal


def test_what_holds_itself_is_named() -> None:
    """So is what is nested deeper than readers of JSON go; what is there twice is kept twice."""
    log: dict[str, object] = {"twice": [[1], [1]], "steps": []}
    log["steps"] = [0, {"log": log}]
    with pytest.raises(CheckpointError, match=r"extra\.steps\.1\.log, a dict, holds itself"):
        encode(log, "extra", {})
    deep: object = 0
    for _ in range(99):
        deep = (deep,)
    assert kept([deep, deep]) == [deep, deep]
    with pytest.raises(CheckpointError, match="is in 100 containers"):
        encode([[deep]], "extra", {})
