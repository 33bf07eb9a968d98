"""Holds the world of one process: it keeps the laws, starts no MPI, and never hangs on itself."""

import subprocess
import sys

import pytest
import torch

from autovaruna.errors import RankError
from autovaruna.runtime.transport.threads import single_world
from tests.runtime.world_laws import LAWS


@pytest.mark.parametrize("law", LAWS)
def test_law(law: str) -> None:
    LAWS[law](single_world())


def test_a_message_that_nobody_sends_is_an_error() -> None:
    with pytest.raises(RankError, match="rank 0 waits for a message of rank 0"):
        single_world().receive([torch.empty(1)], 0, 0).wait()


def test_no_mpi_without_mpirun() -> None:
    script = (
        "import sys; from autovaruna.runtime.environment import get_world; "
        "assert get_world().num_ranks == 1; assert get_world() is get_world(); assert 'mpi4py' not in sys.modules"
    )
    variables = {"PATH": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, env=variables)


def test_abort_prints_and_ends(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        single_world().abort(ValueError("no"), "rank 0, stage 1")
    assert capfd.readouterr().err.startswith("rank 0, stage 1:\nValueError: no")
