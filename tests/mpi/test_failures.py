"""Holds the contract of failures: one clear message, every rank gone within 5 s, and the saved deployment unharmed."""

from __future__ import annotations

import copy
import os
import re
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest
import torch

from tests.mpi import failures
from tests.mpi.launch import mpirun, run_on_ranks
from tests.mpi.refusals import AFTER, BEFORE, DURING, Refusal

RANK_SECONDS = 5.0
MPIRUN_SECONDS = 15.0
START_SECONDS = 15.0
"""What a job takes to come to its fault; where that takes longer, its end may, too."""
FORKED_SECONDS = 2.0
"""How long a rank may outlive its stand-in, which mpirun has ended."""
NUM_TRIES = 3
MODEL = r"failures\.py:\d+ \(out: Tensor = trap\(self\.last\(hidden\)\)\)"
ENDINGS: dict[str, str] = {
    "forward_fails": rf"rank 1, stage 1, micro-batch 0 \(samples 0 to 3 of rank 0\), at .*{MODEL}:\n"
    r"Traceback(?s:.*)ValueError: the story's error",
    "backward_from_outputs_fails": r"rank 1, stage 1, micro-batch 0 (?s:.*)in _trap_backward(?s:.*)the story's error",
    "hook_fails": r"rank 1 failed:(?s:.*)in hook_fails(?s:.*)ValueError: the story's error",
    "script_fails": r"rank 1 failed:(?s:.*)in train(?s:.*)ValueError: the story's error",
    "script_fails_behind_a_hook": r"rank 1 failed:(?s:.*)in barrier_fails(?s:.*)ValueError: the story's error",
    "script_meets_in_a_group_of_its_own": r"rank 0 is in .*, rank 1 is in 'torch\.distributed\.barrier\(\)'",
    "script_shows_errors_itself": r"in barrier_fails(?s:.*)ValueError: the story's error",
    "thread_fails": r"rank 1 failed in thread reader(?s:.*)ValueError: the story's error",
    "every_rank_fails": r"rank 0 failed:(?s:.*)in barrier_fails(?s:.*)ValueError: the story's error",
    "script_raises_system_exit": r"rank 1 ended its script while rank 0 waits in .*Every rank must make the same calls",
    "script_is_interrupted": r"rank 1 failed:(?s:.*)KeyboardInterrupt",
    "process_vanishes_well": "",
    "process_dies_while_others_compute": "",
    "script_asks_for_state_in_backward": r"rank 0 is in 'agreeing on the outputs .*, rank 1 is in 'state_dict'",
    "script_never_calls": r"rank 1 ended its script while rank 0 waits .*the same number of times",
    "process_is_gone_before_others_begin": r"1 of the 2 ranks on this host ended .* before rank 0 came",
    "setting_is_unknown_to_one": r"keyword num_stage: there is no such setting; did you mean num_stages\?",
    "tracing_fails_at_once": r"rank 1 failed while tracing:\nTraceback(?s:.*)ValueError: the story's error",
    "error_is_swallowed": r"rank 1, stage 1, micro-batch 0 (?s:.*)the story's error",
}
"""What the one message says of each story that ends the job; empty: nothing is left that could say something."""
AS_A_USER = "process_is_gone_before_others_begin"
"""The story whose ranks mpirun starts itself, as it looks at mpirun; of the others they are forked."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the file of the deployment that a good run has saved."""
    folder = tmp_path_factory.mktemp("saved")
    file = folder / "deployment.json"
    settings = {"AUTOVARUNA_DEPLOYMENT_FILE": str(file)}
    mpirun(2, "tests.mpi.failures", "nothing_fails", folder, env=settings, is_warm=True)
    return file


class Watch:
    """Notes when the processes of a story were last seen; each has left its number in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last_seen = 0.0
        self._stop = Event()
        self._thread = Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def is_any_alive(self, patience_seconds: float = 0.0) -> bool:
        deadline = time.monotonic() + patience_seconds
        while any(is_running(int(path.name.split("-")[1])) for path in self.folder.glob("process-*")):
            if time.monotonic() >= deadline:
                return True
            time.sleep(0.01)
        return False

    def _look(self) -> None:
        while not self._stop.wait(0.05):
            if self.is_any_alive():
                self.last_seen = time.time()


def is_running(process: int) -> bool:
    """Whether a process is there and has not ended; one that ended stays for a moment, as a zombie."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


@pytest.mark.parametrize("story", ENDINGS)
def test_a_failure_ends_every_rank(story: str, tmp_path: Path, deployment: Path) -> None:
    """With one message and in time, in one try of several: a busy machine may hold up the rank that speaks first."""
    tries = []
    for number in range(NUM_TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        tries.append(unwanted(story, folder, deployment))
        if not tries[-1]:
            return
    pytest.fail("\n\n".join(tries))


def unwanted(story: str, folder: Path, deployment: Path) -> str:
    """Runs a story, and returns what ended too late, or said too much; the rest holds in every try."""
    is_warm = story != AS_A_USER
    before, began = deployment.read_bytes(), time.time()
    with Watch(folder) as watch:
        env = {"AUTOVARUNA_DEPLOYMENT_FILE": str(deployment)}
        done = mpirun(2, "tests.mpi.failures", story, folder, env=env, check=False, is_warm=is_warm)
        ended = time.time()
        is_one_left = watch.is_any_alive(FORKED_SECONDS if is_warm else 0.0)
    fault = float((folder / "fault").read_text())
    assert done.returncode != 0
    assert re.search(ENDINGS[story], done.stderr), done.stderr
    assert not is_one_left
    assert deployment.read_bytes() == before
    slowness = max(1.0, (fault - began) / START_SECONDS)
    is_one = done.stderr.count("Traceback (most recent call last)") == bool(ENDINGS[story])
    is_in_time = ended - fault < MPIRUN_SECONDS * slowness and watch.last_seen - fault < RANK_SECONDS * slowness
    return "" if is_one and is_in_time else f"{watch.last_seen - fault:.1f} s, {ended - fault:.1f} s\n{done.stderr}"


REFUSALS: dict[str, tuple[str, str]] = {
    "models_differ": ("RankError", r"parameter first\.weight is \(8, 4\).* on rank 0, \(16, 4\).* on rank 1"),
    "settings_differ": ("RankError", "num_micro_batches is 4 on rank 0, 8 on rank 1"),
    "trace_fails": ("TraceError", r"BadTrace raises ValueError on these inputs at .*the story's error"),
    "measuring_fails": ("MeasureError", rf"block /trap .* at .*{MODEL}: got ValueError: the story's error"),
    "too_many_stages": ("PlanError", r"num_stages is 40, but the model has only \d+ blocks"),
    "too_few_micro_batches": ("PlanError", "num_micro_batches is 1, but each of 2 ranks .* set it to 2 or more"),
    "weight_fails": ("ValueError|RankError", "the story's error"),
    "weight_is_negative": ("InputError", "micro_batch_weight returned -1.0"),
    "weights_are_zero": ("InputError", "sum above zero"),
    "optimizer_of_wrong_type": ("InputError", r"got list, expected a torch\.optim\.Optimizer"),
    "replicated_sizes_differ": ("RankError", r"batches of \[4, 6\] samples.*inputs='per_rank'"),
    "shapes_differ": ("RankError", r"input x is \(batch, 4\) float32 on rank 0, \(batch, 3\) float32 on rank 1"),
    "constants_differ": ("RankError", r"constant scale is 1\.0 on rank 0, 2\.0 on rank 1"),
    "modes_differ": ("RankError", r"the model's mode is train\(\) on rank 0, eval\(\).* Evaluate on every rank"),
    "grad_modes_differ": ("RankError", "grad mode is True on rank 0, False on rank 1"),
    "no_batch": ("InputError", "No argument of the model is a batch"),
    "no_batch_on_one": ("InputError", "No argument of the model is a batch"),
    "batches_differ": ("TraceError", r"raises RuntimeError on these inputs .* Got x \(3, 4\).*, y \(4, 2\)"),
    "all_empty": ("InputError", "Every rank passed an empty batch"),
    "shape_does_not_fit": ("TraceError", r"raises RuntimeError on these inputs at .*failures\.py:\d+ \(hidden = "),
    "backward_twice": ("OrderError", "Backward through the same step a second time"),
    "calls_differ": ("RankError", r"rank 0 is in .reading the model's inputs .* rank 1 is in 'state_dict"),
    "no_backward_on_one": ("RankError", "the number of backwards is 1 on rank 0, 0 on rank 1"),
    "gradients_of_loss_differ": ("RankError", "the gradient of the last loss is 1 on rank 0, 2 on rank 1"),
    "moved": ("InputError", "before the first call"),
    "assigned": ("InputError", r"Expected load_state_dict\(state\), which copies"),
    "replaced": ("InputError", r"replaced after the first call: got other ones for \['first.weight'\]"),
    "replaced_before": ("InputError", r"functional_call\(\) of the wrapped model.* Expected it inside of a forward"),
}
"""The kind of error that both ranks raise in each story, and what its message says."""


@cache
def refusals() -> list[dict[str, Refusal]]:
    return run_on_ranks(2, "tests.mpi.refusals:refusals")


@pytest.mark.parametrize("story", [*BEFORE, *DURING, *AFTER])
def test_every_rank_gets_the_error(story: str) -> None:
    kind, words = REFUSALS[story]
    for refused in refusals():
        assert re.fullmatch(kind, refused[story][0]), refused[story]
        assert re.search(words, refused[story][1].replace("\n", " ")), refused[story][1]


@pytest.mark.parametrize("story", DURING)
def test_training_goes_on_after_the_error(story: str) -> None:
    assert [refused[f"after {story}"] for refused in refusals()] == [("", "")] * 2


@pytest.mark.skipif("OMPI_COMM_WORLD_SIZE" in os.environ, reason="it is of one process, which goes on after the error")
@pytest.mark.parametrize("make", [failures.Net, failures.OutputNet])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_failed_step_leaves_nothing_on_one_process(
    make: type[failures.Net], direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, the gradients of the micro-batches before the error were added to those of the next step."""
    net, data = make(), failures.batch(8)
    plain = copy.deepcopy(net)
    model, _ = failures.wrap(net, stage_ranks=[[0], [0]], num_micro_batches=4)
    backward(model, data)
    left = [1, 1]

    def third_fails() -> None:
        if not left:
            raise ValueError(failures.TEXT)
        left.pop()

    monkeypatch.setattr(failures, "fail", third_fails)
    failures.FAILING.add(direction)
    with pytest.raises(ValueError, match=failures.TEXT):
        backward(model, data)
    failures.FAILING.clear()
    net.zero_grad()
    backward(model, data)
    backward(plain, data)
    for parameter, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def backward(model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    out = model(*data)
    (out if out.dim() == 0 else out.square().mean()).backward()
