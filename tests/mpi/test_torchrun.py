"""Holds ranks that launchers of torch.distributed start to what ranks of mpirun do: laws, numbers, ends."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

import pytest

from autovaruna.errors import ConfigError
from autovaruna.ranks import environment
from autovaruna.ranks.environment import check_slurm, first_host, is_of_torch, num_ranks_in, variables_beside_mpi
from tests.mpi.launch import QUIET, ROOT, mpirun, run_group, warm

MODULE = "tests.mpi.torch_ranks"
Rank = tuple[str, str, int]
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM", "PMI"))}
SETTINGS = {"AUTOVARUNA_SAVE_DEPLOYMENT": "0", "AUTOVARUNA_LOAD_DEPLOYMENT": "0", "AUTOVARUNA_PROFILE_ITERATIONS": "1"}
ENV = {**PLAIN, **QUIET, **SETTINGS}


def torchrun(num_ranks: int, module: str, *words: str | Path) -> CompletedProcess[str]:
    """Runs a module on ranks of torchrun, which are forked; `test_launcher` has others."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return run_group([*command, "--no-python", *warm().words(module), *map(str, words)], 200, ENV)


def without_launcher(num_ranks: int, story: str, folder: Path, name: str = "RANK", **variables: str) -> list[Rank]:
    """Returns the ends of ranks that no launcher looks after, as tasks of srun: output, errors, status."""
    ranks = [
        Popen([*warm().words(MODULE), story, str(folder)], cwd=ROOT, env={**ENV, **variables, name: str(rank)},
              stdout=PIPE, stderr=PIPE, text=True)
        for rank in range(num_ranks)
    ]  # fmt: skip
    try:
        return [(*rank.communicate(timeout=100), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.fixture
def address() -> Iterator[dict[str, str]]:
    """Returns where ranks meet. The port is held meanwhile: nobody else gets it, and the ranks may listen there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns what three ranks have written."""
    place = tmp_path_factory.mktemp("torchrun")
    done = torchrun(3, MODULE, "laws_and_training", place)
    assert done.returncode == 0, done.stderr
    return place


def test_ranks_of_torchrun_keep_the_laws_of_worlds(folder: Path) -> None:
    assert [json.loads((folder / f"broken{rank}").read_text()) for rank in range(3)] == [{}] * 3


def losses(folder: Path, channel: str) -> list[list[float]]:
    return [json.loads((folder / f"{channel}{rank}").read_text()) for rank in range(3)]


def test_losses_are_those_of_mpirun(folder: Path, tmp_path: Path) -> None:
    """Bit for bit; within rounding where gloo sums, beside the script's own process group."""
    found = losses(folder, "auto")
    mpirun(3, MODULE, "train", tmp_path, env=SETTINGS, is_warm=True)
    assert found == losses(tmp_path, "auto")
    for of_gloo, expected in zip(losses(folder, "gloo"), found, strict=True):
        assert of_gloo == pytest.approx(expected, rel=1e-4)


ENDS = {
    "vanish": "rank 1 has ended without a word",
    "ends_early": "rank 1 ended its script while rank 0 waits in 'barrier'",
}


@pytest.mark.parametrize("story", ENDS)
def test_a_rank_that_fails_ends_all(story: str, tmp_path: Path, address: dict[str, str]) -> None:
    """Ranks are started without torchrun, as others do who end no rank when another has ended."""
    _, texts, statuses = zip(*without_launcher(3, story, tmp_path, WORLD_SIZE="3", **address), strict=True)
    fault = max(float((tmp_path / f"fault{rank}").read_text()) for rank in range(3))
    assert time.time() - fault < 30  # the launcher's own wait is longer
    assert all(statuses)
    text = "".join(texts)
    assert ENDS[story] in text, text
    assert text.count("Traceback") == (story != "vanish"), text


def test_the_last_words_of_torchrun_are_of_the_rank_that_failed(tmp_path: Path) -> None:
    done = torchrun(2, MODULE, "error", tmp_path)
    assert done.returncode
    cause = done.stderr.rpartition("Root Cause")[2]
    assert "rank      : 1" in cause and "rank 1 failed:" in cause and "ValueError: the story's error" in cause


def test_the_next_attempt_of_torchrun_trains(tmp_path: Path, address: dict[str, str]) -> None:
    """Once, with a static rendezvous, it met addresses of ranks that had ended: ConnectionRefusedError, or no end."""
    options = ["--nproc-per-node=2", "--max-restarts=2", "--rdzv-backend=static"]
    options += [f"--master-addr={address['MASTER_ADDR']}", f"--master-port={address['MASTER_PORT']}"]
    words = ["-m", "torch.distributed.run", *options, "-m", MODULE, "restarted", str(tmp_path)]
    done = run_group([sys.executable, *words], 200, ENV)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"attempt{rank}").read_text() for rank in range(2)] == ["1", "1"]


def test_torchrun_passes_on_the_signals_that_its_option_names(tmp_path: Path) -> None:
    """Without it, torchrun ends from SIGUSR1, and nothing is saved. Its own status is 1, whatever that of its ranks."""
    options = ["--nproc-per-node=2", "--standalone", "--signals-to-handle=SIGTERM,SIGUSR1"]
    words = ["-m", "torch.distributed.run", *options, "-m", "tests.mpi.preempted", str(tmp_path), "launcher"]
    done = run_group([sys.executable, *words], 200, ENV)
    saved = [int(folder.name[5:]) for folder in tmp_path.glob("step-*")]
    assert len(saved) == 1 and f"got SIGUSR1: saved step {saved[0]}, and end with status 75" in done.stderr, done.stderr
    assert done.returncode == 1


TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2"}


def test_mpirun_wins_over_variables_that_a_script_has_set() -> None:
    assert num_ranks_in(TORCH) == 4 and is_of_torch(TORCH)
    assert num_ranks_in(TORCH | OPEN_MPI) == 2 and not is_of_torch(TORCH | OPEN_MPI)
    torchrun_on_each_host = TORCH | OPEN_MPI | {"TORCHELASTIC_RUN_ID": "7"}
    assert num_ranks_in(torchrun_on_each_host) == 4 and is_of_torch(torchrun_on_each_host)


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_launcher_that_says_too_little_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"WORLD_SIZE is 4, but {name} is not set.*`mpirun -np 4 python .*`"):
        environment.start_torch({key: value for key, value in TORCH.items() if key != name})


def test_tasks_of_srun_that_mpi_does_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, by all: a thousand ranks would say the same."""
    monkeypatch.setattr(environment, "_REFUSED_SECONDS", 0.0)
    with pytest.raises(ConfigError, match=r"srun started 4 tasks .*`mpirun -np 4 python .*`, .*`torchrun "):
        check_slurm({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"})
    with pytest.raises(SystemExit):
        check_slurm({"SLURM_NTASKS": "4", "SLURM_PROCID": "2"})
    check_slurm({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})  # of a batch script, which is one process
    check_slurm({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"})  # of a shell


SLURM = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}


def test_tasks_of_srun_without_mpi_join_by_variables_of_torch_or_slurm(tmp_path: Path, address: dict[str, str]) -> None:
    """As ``srun -N2 -n2 python train.py`` starts them; once, each was refused, for MPI knows of one process alone."""
    for variables, name in ((SLURM, "SLURM_PROCID"), (SLURM | address | {"WORLD_SIZE": "2"}, "RANK")):
        ends = without_launcher(2, "rank", tmp_path, name, **variables)
        assert [out.split() for out, _, _ in ends] == [["0", "2"], ["1", "2"]], ends


def test_what_says_which_rank_this_is_beside_mpi() -> None:
    own = variables_beside_mpi(SLURM | {"SLURM_PROCID": "1"})
    assert own == {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "20372"}
    assert variables_beside_mpi(TORCH | SLURM | {"SLURM_PROCID": "1"}) == TORCH
    assert variables_beside_mpi({"SLURM_STEP_NUM_TASKS": "2"}) == {}
    hosts = {"node[01-04,07],login": "node01", "tux12,tux14": "tux12", "rack[1-2]node[3-4]": "rack1node3", "a": "a"}
    assert {nodes: first_host(nodes) for nodes in hosts} == hosts
