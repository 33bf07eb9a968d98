"""The page of a run: it has the numbers of the run, needs nothing else, and reads well in a browser."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import pytest
import torch
from torch import nn

from autovaruna import AutoVaruna
from autovaruna.__main__ import main
from autovaruna.commands.report import RunFolder, advice, page
from autovaruna.planner.table import seconds
from autovaruna.ranks.world import World
from tests.catalogue.small import Written
from tests.rank_threads import run_ranks
from tests.session.training import QUIET

NUM_STEPS, NUM_MICRO_BATCHES = 17, 4
Trained = tuple[Path, float, Any]
"""The folder of a run, its last loss and its plan."""


def train(folder: Path | None, num_steps: int = NUM_STEPS, **settings: Any) -> tuple[AutoVaruna, float]:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    net = Written(lambda self, x: self.layers(x).square().mean(), layers=layers)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings |= {"report_dir": str(folder)} if folder else {}
    model = AutoVaruna(net, optimizer, **QUIET, **settings)
    for step in range(num_steps):
        loss = model(torch.full((8, 4), float(step % 3)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, loss.item()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("runs") / "first"

    def be_rank(world: World) -> tuple[float, Any]:
        model, loss = train(folder, stage_ranks=[[0], [1]], num_micro_batches=NUM_MICRO_BATCHES)
        return loss, model.plan

    return folder, *run_ranks(2, be_rank)[0]


def read(text: str) -> Element:
    """Reads a page strictly, as XML but for what has no end: every element is closed in turn."""
    assert text.startswith("<!doctype html>")
    return fromstring(re.sub(r"<((?:meta|link) [^>]*)>", r"<\1/>", text.removeprefix("<!doctype html>")))


def test_the_page_has_the_numbers_of_the_run_and_needs_nothing_else(trained: Trained) -> None:
    folder, loss, plan = trained
    assert main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text()
    found = read(text)
    links = [value for each in found.iter() for name, value in each.items() if name in ("src", "href", "srcset")]
    assert links == ["data:,"] and not re.search(r"https?:|@import|url\(", text)
    shown = dict(re.findall(r'<dd id="(\w+)">([^<]+)</dd>', text))
    assert (shown["loss"], shown["steps"]) == (f"{loss:.5g}", str(NUM_STEPS))
    assert (shown["predicted"], shown["bound"]) == (seconds(plan.predicted_seconds), seconds(plan.bound_seconds))
    inside = re.findall(r"<h3>(measured|predicted): [\d.]+ [mu]?s</h3>", text)
    assert inside == ["measured", "predicted"]
    layers = [each.text for each in found.iterfind(".//*[@id='plan']//td[@data-name='layers']")]
    assert len(layers) == 2 and all(layers) and "layers" in (layers[0] or "")  # the second may have the loss alone
    names = re.findall(r"<title>(\d+[FB]\d+): ", text)
    every = [f"{stage}{kind}{m}" for stage in (0, 1) for kind in "FB" for m in range(NUM_MICRO_BATCHES)]
    assert sorted(names) == sorted(2 * every)  # measured and predicted
    shares = re.findall(r'<td data-name="(?:work|bubble|imbalance|messages|all-reduce|overhead)">([\d.]+)%', text)
    assert len(shares) == 12
    assert sum(map(float, shares[:6])) == pytest.approx(100, abs=0.5) == sum(map(float, shares[6:]))
    assert "num_micro_batches" in text and "<polyline" in text


def test_the_trace_ends_after_the_first_steps_if_asked_for(trained: Trained, tmp_path: Path, monkeypatch: Any) -> None:
    text = (trained[0] / "events.trace.json").read_text()
    assert max(map(int, re.findall(r'"step": (\d+)', text))) == 16 < NUM_STEPS
    monkeypatch.chdir(tmp_path)
    train(None, 1, num_micro_batches=2)
    assert {each.name for each in tmp_path.iterdir()} <= {"profiles"}


def test_one_process_without_a_plan_has_a_page_as_well(tmp_path: Path) -> None:
    train(tmp_path / "plain", 3)
    text = page(RunFolder(tmp_path / "plain"))
    read(text)
    assert "there is no plan" in text and 'id="advice"' in text and "<polyline" in text


def changed(trained: Trained, tmp_path: Path, *events: dict[str, Any]) -> RunFolder:
    """Returns a copy of a run in which more has happened."""
    folder = Path(shutil.copytree(trained[0], tmp_path / "copy"))
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": 2e9, "text": "", **each}) + "\n" for each in events)
    return RunFolder(folder)


def account(**parts: float) -> dict[str, Any]:
    row = {"work": 1.0, **dict.fromkeys(("bubble", "imbalance", "messages", "all-reduce", "overhead"), 0.0)}
    rows = [{**row, **parts}, row]
    return {"event": "account", "call": 20, "seconds": 1.0, "predicted_seconds": 1.0, "ranks": rows}


START = {"event": "start", "model": "Written", "num_ranks": 2, "hosts": ["a", "b"], "num_cores": 4, "num_threads": 1}
START |= {"stages": ["layers.0 .. 1", "layers.2 .. 3"], "settings": {}}
SLOW_STEPS = [{"event": "step", "step": step, "seconds/step": 1e3} for step in range(18, 68)]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([START | {"hosts": ["a", "a"], "num_cores": 1}], "2 ranks of one host share 1 core and"),
        ([START, account(bubble=0.4)], f"num_micro_batches={2 * NUM_MICRO_BATCHES}, now {NUM_MICRO_BATCHES}"),
        ([START, account(work=2.0)], "Rank 0 (stage 0: layers.0 .. 1) computes 33% longer"),
        ([START, account(messages=0.4)], "Messages between stages take 20% of the step"),
        ([START, account(**{"all-reduce": 0.4})], "Sums of gradients over replicas take 20%"),
        ([START, {"event": "step", "step": 18, "loss": float("nan")}], "not a number from step 18 on"),
        ([START, {"event": "step", "step": 18, "memory_bytes/rank_1": 1e15}], "Rank 1 uses"),
        ([START, *SLOW_STEPS], "times what was predicted"),
    ],
)
def test_what_to_try_next(events: list[dict[str, Any]], words: str, trained: Trained, tmp_path: Path) -> None:
    assert any(words in each for each in advice(changed(trained, tmp_path, *events)))


def test_steps_that_an_attempt_did_again_count_once(trained: Trained, tmp_path: Path) -> None:
    lost = {"event": "lost", "text": "host h2 is lost"}
    again = [{"event": "step", "step": step, "loss": 7.0} for step in (15, 16)]
    run = changed(trained, tmp_path, lost, START, *again)
    assert [each["step"] for each in run.steps] == list(range(1, 17))
    assert [each["loss"] for each in run.steps[-2:]] == [7.0, 7.0]
    assert "host h2 is lost" in page(run)


def test_a_folder_that_is_none_of_a_run_is_refused(trained: Trained, tmp_path: Path, capsys: Any) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "expected the folder of a run with report_dir" in capsys.readouterr().err
    run = changed(trained, tmp_path)
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "ev')  # a run that was killed
    assert len(run.steps) == NUM_STEPS
