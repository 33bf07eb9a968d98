"""When a job is started again, and when it is given up."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from autovaruna.elastic import notices
from autovaruna.elastic.host_processes import processes_with
from autovaruna.elastic.manager import Restarts, _name_of
from autovaruna.elastic.notices import new_address_file, own_address, pop_dead_manager, receiving_notices
from autovaruna.elastic.options import LaunchOptions, MorphingOptions
from autovaruna.elastic.run import Outcome
from autovaruna.ranks.tls import Authority
from tests.hosts.emulation import wait_for
from tests.mpi.launch import QUIET, ROOT, find_mpirun, read_until
from tests.products import WHOLE

FAILED, NOBODY = Outcome("rank 1 ended with status 3", error=3), Outcome("mpirun ended with status 137")
DIES = "MPI.COMM_WORLD.rank == 1 and os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
NOT_STARTED = Outcome("not every rank has started", unfit=("h2",))


def killed(rank: int = 1, step: int = 7) -> Outcome:
    return Outcome(f"rank {rank} was ended by SIGKILL; the kernel says", error=137, killed=(rank, step))


GIVEN_UP: dict[str, tuple[int, list[tuple[Outcome, int]], str]] = {
    "fails": (100, [(FAILED, 7)] * 3, "three runs failed and came no further than step 7: rank 1 ended with status 3"),
    "comes further": (100, [(FAILED, step) for step in range(50)], ""),
    "killed": (100, [(killed(), 7)] * 3, "rank 1 was killed three times at step 7 (SIGKILL); the kernel says"),
    "at other steps": (100, [(killed(step=step), 7) for step in range(20)], ""),
    "others": (100, [(killed(rank), 7) for rank in range(20)], ""),
    "later": (100, [(killed(), step) for step in range(20)], ""),
    "both": (100, [(each, 7) for each in (killed(), FAILED, NOBODY, killed(), FAILED, NOBODY, FAILED)], "three runs"),
    "not started": (4, [(NOT_STARTED, 7)] * 20, ""),
    "asked for": (4, [(Outcome("host h2 is there", is_asked=True), step) for step in range(20)], ""),
    "too often": (4, [(NOBODY, step) for step in range(5)], "5 starts again within an hour"),
}


@pytest.mark.parametrize(("most", "runs", "why"), GIVEN_UP.values(), ids=GIVEN_UP)
def test_a_job_that_fails_in_vain_is_given_up(most: int, runs: list[tuple[Outcome, int]], why: str) -> None:
    """Or ends too often. Faults during recoveries are not the script's; neither are hosts where no rank can start."""
    restarts = Restarts(most)
    *earlier, last = [restarts.record(outcome, step) for outcome, step in runs]
    assert not any(earlier) and last.startswith(why) and bool(last) == bool(why)


def test_starts_again_that_come_no_further_are_spaced_out() -> None:
    restarts, found = Restarts(100), []
    for step in (7, 7, 7, 7, 7, 7, 8, 8):
        restarts.record(NOBODY, step)
        found.append(restarts.delay_seconds)
    assert found == [0, 0, 0, 1, 2, 4, 0, 0]


@contextmanager
def started(
    folder: Path,
    script: str,
    *options: str,
    num_ranks: int = 2,
    program: tuple[str, str] = ("-m", "autovaruna"),
    start: tuple[str, ...] = ("--no_standby",),
) -> Iterator[subprocess.Popen[str]]:
    """Starts a job that may be started again three times; it is killed at the end of the context if it still runs."""
    find_mpirun()
    (folder / "train.py").write_text(f"import os, signal, subprocess, sys, time\n{script}\n")
    call = [sys.executable, *program, "run", *start, "--ranks_per_host", str(num_ranks)]
    variables = {**os.environ, **QUIET, "HOME": str(folder), "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    job = subprocess.Popen(
        [*call, "--max_restarts", "3", *options, "train.py"], cwd=folder, env=variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield job
    finally:
        job.kill()


def run(folder: Path, script: str, *options: str, num_ranks: int = 2) -> tuple[int, str]:
    """Returns the status of a job, and what it said."""
    with started(folder, script, *options, num_ranks=num_ranks) as job:
        said, _ = job.communicate(timeout=120)
        return job.returncode, said


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("MPI.COMM_WORLD.rank == 1 and os._exit(0)\ntime.sleep(60)", 1, "rank 1 ended with status 0 before the others"),
        ("sys.exit(75)", 75, "ended with status 75: status 75"),
        (DIES, 137, "was ended by SIGKILL"),
    ],
    ids=["too early", "as if a signal had come", "killed"],
)
def test_a_script_that_ends_before_a_step_ends_the_job(tmp_path: Path, script: str, status: int, words: str) -> None:
    options = ["--no_morphing"] if script == DIES else []
    found, said = run(tmp_path, f"from mpi4py import MPI\n{script}", *options)
    assert found == status and words in said and "started again" not in said, said


def test_a_job_has_finished_when_its_ranks_have_whatever_they_leave_running(tmp_path: Path) -> None:
    """Once, mpirun waited for the output of what ranks had started, and the manager for mpirun."""
    words = f"import time; time.sleep(600)  # {tmp_path}"
    leave = f"subprocess.Popen([sys.executable, '-c', {words!r}], start_new_session=True)"
    status, said = run(tmp_path, f"from mpi4py import MPI\n{leave}")
    assert status == 0 and "the job has finished" in said, said
    assert not processes_with(words.encode())


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGUSR1, 5), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 128 + signal.SIGINT)],
    ids=["handled", "not handled", "interrupted"],
)
def test_what_a_signal_means_is_for_the_script_to_say(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """Once, the manager kept signals to itself, and ended with a status that says that all is saved."""
    script = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(5))\nprint('up', flush=True)\ntime.sleep(60)"
    with started(tmp_path, script, num_ranks=1) as job:
        read_until(job, "up")
        job.send_signal(number)
        said, _ = job.communicate(timeout=120)
    assert job.returncode == status and "is gone" not in said, said


TRAINS = """
import torch
from autovaruna import AutoVaruna
torch.manual_seed(0)
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
model = AutoVaruna(net, optimizer, load_deployment=False, save_deployment=False, progress=False)
for step in range(FIRST, 100_000):
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    print("step", step, flush=True)
    time.sleep(0.05)
"""
RESUMES = TRAINS.replace("FIRST", "model.resume().step")


@pytest.mark.skipif(not WHOLE, reason="three starts; `Restarts` is held to it above: make test-whole")
def test_a_rank_that_is_killed_at_the_same_step_again_and_again_ends_the_job(tmp_path: Path) -> None:
    """Once, it was started again for ever, and where the script does not resume, without a word of that."""
    dies = "    step == 4 and os.kill(os.getpid(), signal.SIGKILL)\n"
    status, said = run(tmp_path, TRAINS.replace("FIRST", "0") + dies, num_ranks=1)
    assert status == 137 and "rank 0 was killed three times at step 4 (SIGKILL): the job is given up" in said, said
    assert said.count("has not called model.resume()") == 1 and said.count("step 4\n") == 3, said


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 75)], ids=lambda each: str(each))
def test_ctrl_c_and_a_terminal_that_closes_save_what_there_is(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:  # below nohup, and so in what is started
        signal.signal(number, signal.SIG_DFL)
    with started(tmp_path, RESUMES, "--checkpoints", str(tmp_path / "saved"), num_ranks=1) as job:
        signal.signal(number, before)
        said = read_until(job, "[0] step 9")
        job.send_signal(number)
        said += job.communicate(timeout=120)[0]
    (saved,) = (tmp_path / "saved").glob("step-*")
    assert job.returncode == status and int(saved.name[5:]) >= 5, said


def test_a_start_that_is_refused_keeps_what_there_is_and_says_so(tmp_path: Path) -> None:
    """Once, it removed what hosts held. With another value of a variable that the script reads it is another job."""
    script, machines = RESUMES.replace("0.1)", "float(os.getenv('RATE', '0.1')))"), tmp_path / "machines"
    machines.write_text("localhost\n")
    options = ["--machine_list", str(machines), "--keep_seconds", "60", "--start_seconds", "20"]
    with started(tmp_path, script, *options, num_ranks=1) as job:
        read_until(job, "[0] step 9")
    machines.write_text("localhost\nelsewhere.invalid\n")
    status, said = run(tmp_path, script, *options, "--min_ranks", "2", num_ranks=1)
    assert status == 1 and re.search(r"step \d+ stays in memory of localhost for 60 s: the same command", said), said
    machines.write_text("localhost\n")
    with started(tmp_path, script, *options, "--batch_size", "4", num_ranks=1) as job:
        said = read_until(job, "autovaruna: training")
    assert re.search(r"step \d+, in memory of localhost for \d+ s; batch_size is 4, was None: 1 ranks", said), said


def test_for_what_a_job_left_that_ended_long_ago_nobody_waits(tmp_path: Path) -> None:
    """Once, the same command waited half a minute for each host that did not answer, at each start."""
    machines = tmp_path / "machines"
    options = ["--machine_list", str(machines), "--keep_seconds", "0", "--start_seconds", "20"]
    machines.write_text("localhost\n")
    with started(tmp_path, RESUMES, *options, num_ranks=1) as job:
        read_until(job, "[0] step 9")
    (left,) = (tmp_path / ".autovaruna" / "jobs").glob("*.json")
    os.utime(left, (0, 0))
    machines.write_text("localhost\nelsewhere.invalid\n")
    with started(tmp_path, RESUMES, *options, num_ranks=1) as job:
        said = read_until(job, "autovaruna: training")
    assert "elsewhere.invalid cannot be used" in said and "waiting" not in said, said


def test_a_python_that_was_built_for_an_older_system_will_do(tmp_path: Path) -> None:
    """Once, no job could be started by that of conda, whose `os` has neither files in memory nor those of processes."""
    (tmp_path / "sitecustomize.py").write_text("import os\ndel os.memfd_create, os.pidfd_open\n")
    dies = "    step == 9 and not os.path.exists('x') and (open('x', 'w'), os.kill(os.getpid(), signal.SIGKILL))\n"
    with started(tmp_path, RESUMES + dies, num_ranks=1, start=()) as job:
        said = read_until(job, "autovaruna: training", count=2)
    assert "rank 0 was ended by SIGKILL: the job is started again" in said, said


STANDS_STILL = """
import runpy
from autovaruna.elastic import run
run._PAUSE_SECONDS, run.SILENT_SECONDS = 1.0, {silent_seconds}
runpy.run_module("autovaruna", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("silent_seconds", "goal"), [(5.0, "autovaruna: training"), (30.0, "[0] step 150")], ids=["long", "for a moment"]
)
def test_a_manager_that_was_stopped_says_so_and_blames_no_rank(
    tmp_path: Path, silent_seconds: float, goal: str
) -> None:
    """Once, ranks were said to hang, or mpirun to have ended; keepers are as patient here as ever."""
    program = "-c", STANDS_STILL.format(silent_seconds=silent_seconds)
    with started(tmp_path, RESUMES, num_ranks=1, program=program) as job:
        said = read_until(job, "[0] step 9")
        job.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        job.send_signal(signal.SIGCONT)
        said += read_until(job, goal)
    ended = re.findall(r"autovaruna: (.*): the job is started again", said)
    assert [words.startswith("the manager itself stood still for") for words in ended] == [True] * (silent_seconds < 30)


BREAKS = """
import os, runpy
from autovaruna.elastic.hosts import Hosts
def fail(self, hosts):
    assert not os.path.exists("broken"), "it is broken"
Hosts.record_copy_faults = fail
runpy.run_module("autovaruna", run_name="__main__", alter_sys=True)
"""


def test_an_error_of_the_manager_itself_loses_nothing(tmp_path: Path) -> None:
    """Once, it removed what hosts held, and wrote no checkpoint."""
    options = ["--keep_seconds", "60", "--checkpoints", str(tmp_path / "saved")]
    with started(tmp_path, RESUMES, *options, num_ranks=1, program=("-c", BREAKS)) as job:
        said = read_until(job, "[0] step 9")
        (tmp_path / "broken").touch()
        said += job.communicate(timeout=120)[0]
    (saved,) = (tmp_path / "saved").glob("step-*")
    assert job.returncode == 1 and "it is broken" in said and int(saved.name[5:]) >= 5, said
    assert re.search(r"stays( in memory of localhost)? for 60 s: the same command", said), said
    with started(tmp_path, RESUMES, *options, num_ranks=1) as job:
        said = read_until(job, "autovaruna: training")
    assert re.search(r"goes on from step \d+, in memory of localhost", said), said


def test_a_signal_while_keepers_start_has_its_own_status(tmp_path: Path) -> None:
    """Once, it was that of Ctrl-C."""
    (tmp_path / "machines").write_text("localhost\nelsewhere.invalid\n")
    options = ["--machine_list", str(tmp_path / "machines"), "--min_ranks", "2"]
    with started(tmp_path, RESUMES, *options, num_ranks=1) as job:
        wait_for(lambda: list((tmp_path / ".autovaruna" / "jobs").glob("*.json")), "the manager")
        job.send_signal(signal.SIGTERM)
        said, _ = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM and "SIGTERM came: status 143" in said, said


def name_of(script: bytes, variables: dict[str, str], arguments: tuple[str, ...] = (), job: str = "") -> str:
    """Returns the name of a job."""
    morphing = MorphingOptions(None, 1, job=job)
    options = LaunchOptions({}, None, 0, 0, variables, Path("/"), "train.py", arguments, None, None, morphing)
    return _name_of(options, script)


def test_a_job_is_another_one_where_its_script_is_given_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, a run with another rate in a variable went on from what a killed one had left, with the old rate."""
    reads, plain = b"lr = float(os.environ['LR']); x = os.environ.get(\"X\")", b"print()"
    names = [name_of(reads, {}), name_of(plain, {}), name_of(plain, {}, ("--lr", "1"))]
    names += [name_of(plain, {"LR": "1"}), name_of(plain, {}, job="other")]
    for name in ("LR", "X", "UNREAD"):
        monkeypatch.setenv(name, "1")
        names.append(name_of(reads, {}))
    assert len(set(names)) == len(names) - 1 and names[-1] == names[-2]


def test_a_manager_is_dead_whose_number_is_another_process_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a reboot; once, its job was forgotten, as where the next manager was killed while it started."""
    monkeypatch.setenv("HOME", str(tmp_path))
    authority = Authority()
    for is_reused in (False, True):
        address = own_address(authority, "job", "folder", 0, {})
        with receiving_notices(new_address_file(), lambda *_: "", authority, address) as own:
            replace(own, birth="1" if is_reused else own.birth).write(path := new_address_file())
        os.utime(path, (time.time() - 900.0, time.time() - 900.0))
        found = pop_dead_manager("job", claimed := new_address_file())
        assert found is None or 890.0 < found.silent_seconds < 1000.0
        assert (found is not None and found.folder == "folder" and not path.exists()) == is_reused
        path.unlink(missing_ok=True)
    assert pop_dead_manager("job", new_address_file()) is None, "the process that has taken it up is alive"
    monkeypatch.setattr(notices, "birth_of", lambda process: "2")  # now it is not
    again = pop_dead_manager("job", new_address_file())
    assert again is not None and (again.folder, again.key) == ("folder", authority.key) and not claimed.exists()


SPOILS = (
    RESUMES
    + """
    if step == 9 and not os.path.exists("spoilt"):
        import json, msgspec, pathlib
        from autovaruna.elastic.job_folder import RankPart, read_part, write_record
        slots = pathlib.Path(json.loads(os.environ["VARUNA_JOB"])["folder"]).glob("attempt-*/rank-*/slot-*")
        step, slot = max((part.step, slot) for slot in slots if (part := read_part(slot)))
        open("spoilt", "w").write(str(step))
        text = msgspec.json.encode(read_part(slot)).replace(b'"weight"', b'"height"')
        write_record(slot, msgspec.json.decode(text, type=RankPart))
        os.kill(os.getpid(), signal.SIGKILL)
"""
)


def test_a_state_that_cannot_be_loaded_is_put_aside_and_the_one_before_it_is_taken(tmp_path: Path) -> None:
    """Once, the job failed three times, was given up, and that state had taken the place of the newest checkpoint."""
    with started(tmp_path, SPOILS, "--checkpoints", str(tmp_path / "saved"), num_ranks=1) as job:
        said = read_until(job, "put aside")
        said += read_until(job, "[0] step 12")
        job.send_signal(signal.SIGTERM)
        said += job.communicate(timeout=120)[0]
    spoilt = int((tmp_path / "spoilt").read_text())
    firsts = [int(text.split()[0].rstrip(",")) for text in said.split("goes on from step ")[1:]]
    assert firsts[0] == spoilt > firsts[1] > 0 and said.count("is put aside") == 1, said
    assert job.returncode == 75 and len(list((tmp_path / "saved").glob("step-*"))) == 1, said


def test_a_job_goes_on_from_memory_and_says_75_only_of_what_can_be_loaded(tmp_path: Path) -> None:
    """Its manager is killed; then a signal comes, and another one while another job has the folder of checkpoints.

    Another script of the same name does not go on from memory: it is another job.
    """
    saved = tmp_path / "saved"
    options = ["--checkpoints", str(saved), "--keep_seconds", "60"]
    with started(tmp_path, RESUMES, *options, num_ranks=1) as job:
        read_until(job, "[0] step 9")
    status, said = run(tmp_path, "print('up')", *options, num_ranks=1)
    assert status == 0 and "goes on from step" not in said, said
    for is_taken in (False, True):
        with started(tmp_path, RESUMES, *options, num_ranks=1) as job, ExitStack() as stack:
            said = read_until(job, "autovaruna: training")
            if is_taken:
                fcntl.lockf(stack.enter_context(open(saved / ".claim", "r+b")), fcntl.LOCK_EX)
            job.send_signal(signal.SIGTERM)
            said += job.communicate(timeout=120)[0]
        first = int(said.partition("[0] step ")[2].split()[0])
        assert job.returncode == (1 if is_taken else 75) and first > 5, said
        assert is_taken or "goes on from step" in said, said
    (before,) = saved.glob("step-*")
    assert "is gone with this job: Another job saves to" in said, said
    assert first == int(before.name[5:]) and f"that can be loaded is {first}: {before}" in said
