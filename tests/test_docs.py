"""Follows the pages: their Python runs, their tutorials train, their links lead somewhere, every error has a cause."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.mpi.launch import QUIET, find_mpirun
from tests.run_pages import blocks
from tests.test_examples import QUICK

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
WITH_PYTHON = [page for page in PAGES if any(info.startswith("python") for info, _, _ in blocks(page))]
EXAMPLES = [f"examples/{name}.py" for name in ("finetune_hf", "varuna_bert", "tutorial")]
LIBRARIES = ("accelerate", "lightning", "peft", "transformers")
FOLLOWED = ["docs/tutorial/first-run.md", "docs/tutorial/does-not-fit.md"]
"""Pages whose commands are run, after their files have been written."""
COMMANDS = ("python ", "mpirun ", "autovaruna ", "AUTOVARUNA_")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
REPOSITORY = "https://github.com/autovaruna/autovaruna"
RAW = REPOSITORY.replace("github", "raw.githubusercontent")
ABSOLUTE = re.compile(rf"\]\((?:{REPOSITORY}/blob|{RAW})/main/([^)#\s]+)")


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    """What went wrong in the Python of each page, and in examples; one process runs all of them."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} cannot be imported")
    command = [sys.executable, "-m", "tests.run_pages", *WITH_PYTHON, *EXAMPLES]
    variables = {**os.environ, **QUICK}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("page", WITH_PYTHON + EXAMPLES)
def test_the_python_of_a_page_runs_and_an_example_holds_its_own_assertions(page: str, wrong: dict[str, str]) -> None:
    assert not wrong[page], wrong[page]


@pytest.mark.parametrize("page", FOLLOWED)
def test_a_reader_who_follows_a_page_trains(page: str, tmp_path: Path) -> None:
    printed = []
    for info, text, _ in blocks(page):
        if title := re.search(r'title="(.+)"', info):
            (tmp_path / title[1]).write_text(text)
        elif "sh" in info.split() or ".sh" in info:
            lines = [line for line in text.splitlines() if line.startswith(COMMANDS)]
            printed += [run(line, tmp_path, fails=".fails" in info) for line in lines]
    losses = [re.findall(r"^(?:epoch|step) .+", text, re.MULTILINE) for text in printed]
    if "first-run" in page:
        assert losses[0] == losses[1] and len(losses[0]) == 5
    else:
        assert "no plan fits into memory" in printed[0] and len(losses[1]) == 5 and "stages" in printed[1]


def run(line: str, folder: Path, fails: bool = False) -> str:
    """Runs a command as a shell would, on as many cores as there are."""
    binary = Path(sys.executable).parent
    line = line.replace("mpirun", f"{shlex.quote(find_mpirun())} --oversubscribe --bind-to none")
    path = {"PATH": f"{binary}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    own: Any = {"shell": True, "cwd": folder, "env": {**os.environ, **QUIET, **path, **QUICK}}
    done = subprocess.run(line, **own, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_error_text_has_a_cause_and_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    texts = importlib.import_module("error_texts")
    page = (ROOT / "docs/reference/errors.md").read_text()
    filled = texts.fill(page)
    found = texts.collect()
    assert len(found) > 250
    assert [each for each in found if each.text not in filled] == []
    sections = re.split(r"^##+ ", page, flags=re.MULTILINE)
    listed = [each for each in sections if "<!-- errors" in each]
    assert all("**Cause.**" in each and "**Cure.**" in each for each in listed)
    with pytest.raises(LookupError, match="no cause and cure of a TraceError of graph"):
        texts.fill(page.replace("<!-- errors: TraceError graph -->", ""))


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_to_files(page: str) -> None:
    links = LINK.findall((ROOT / page).read_text())
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_an_index_shows_the_readme_whose_links_lead_to_files_of_the_repository() -> None:
    text = (ROOT / "README.md").read_text()
    links = ABSOLUTE.findall(text)
    assert len(links) > 20 and [link for link in links if not (ROOT / link).exists()] == []
    assert LINK.findall(text) == [], f"an index page has no files: expected {REPOSITORY}/blob/main/..."
    for name in ("setup.py", "mkdocs.yml", "CITATION.cff"):
        assert REPOSITORY in (ROOT / name).read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_workflows_pin_their_actions() -> None:
    workflows = list((ROOT / ".github").rglob("*.yml"))
    if not workflows:
        pytest.skip("a source distribution has no workflows")
    assert all(isinstance(yaml.safe_load(file.read_text()), dict) for file in workflows)
    used = [line for file in workflows for line in file.read_text().splitlines() if "uses:" in line]
    assert [line for line in used if not re.search(r"@[0-9a-f]{40} # v[\d.]+$", line)] == []
