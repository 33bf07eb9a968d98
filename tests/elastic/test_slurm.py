"""Jobs of a real Slurm of two nodes on this machine, where it is installed: allocations, signals, requeues."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from autovaruna.__main__ import parser_of
from autovaruna.elastic.host_list import allocated_lines, check_requeue, requeue
from autovaruna.errors import ConfigError
from tests.hosts.elastic_run import SCRIPT, differences, stop_after
from tests.hosts.emulation import wait_for
from tests.mpi.launch import QUIET, ROOT, find_mpirun
from tests.products import WHOLE

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
wait_until = partial(wait_for, seconds=400.0)
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthInfo=socket={folder}/munge,cred_expire=5
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/%n
StateSaveLocation={folder}/state
SlurmUser=root
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16
PartitionName=all Nodes=ALL Default=YES
"""
NAMES = """
import os
from mpi4py import MPI
print(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} on {os.environ.get('SLURMD_NODENAME')}", flush=True)
MPI.COMM_WORLD.Barrier()
"""
EXAMPLES = ROOT / "examples"
ALLOCATION, RUN = "--nodes=2 --ntasks-per-node=2", "python -m autovaruna run"
OF_ALLOCATION = {f"rank {rank} of 4 on n{1 + rank // 2}" for rank in range(4)}
JOBS = {
    "allocation": (f"{RUN} --no_morphing names.py", OF_ALLOCATION),
    "other_names": (
        f"{RUN} --no_morphing --machine_list machines --ranks_per_host 3 names.py",
        {f"rank {rank} of 3" for rank in range(3)},
    ),
    "other_node": (
        f"{RUN} --no_standby --machine_list second --ranks_per_host 2 names.py",
        {"rank 0 of 2 on n2", "rank 1 of 2 on n2", "job has finished"},
    ),
    "pmix": ("srun --mpi=pmix python names.py", OF_ALLOCATION),
}
"""Jobs of two nodes, and what they print. Of those without morphing mpirun starts the ranks, else keepers by srun."""


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a program in the place of Slurm's own."""
    (folder / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_hosts_and_ranks_are_those_that_the_scheduler_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(tmp_path, monkeypatch, 'test "$*" = "show hostnames a[1-3]" && echo a1 && echo a2 && echo a3')
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    (tmp_path / "nodes").write_text("b1\nb1\nb2\n")
    assert allocated_lines(None, slurm) == ["a1", "a1", "a2", "a2", "a3"]
    assert allocated_lines(1, slurm) == ["a1", "a2", "a3"]
    assert allocated_lines(None, {"PBS_NODEFILE": str(tmp_path / "nodes")}) == ["b1", "b1", "b2"]
    assert allocated_lines(2, {"LSB_HOSTS": "c1 c1 c1 c2"}) == ["c1", "c1", "c2", "c2"]
    assert allocated_lines(2, {}) == [] == allocated_lines(None, {"SLURM_JOB_NODELIST": "a[1-3]"})


def test_what_slurm_is_asked_for_in_vain_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--requeue asks Slurm, but SLURM_JOB_ID is not set"):
        check_requeue({})
    scontrol(tmp_path, monkeypatch, "echo no such job >&2; exit 3")
    with pytest.raises(ConfigError, match="`scontrol requeue 7` ended with status 3: no such job"):
        requeue({"SLURM_JOB_ID": "7"})


@pytest.mark.parametrize("name", ["run", "mpirun", "srun", "torchrun"])
def test_a_template_is_options_and_one_command(name: str) -> None:
    first, *lines = (EXAMPLES / "slurm" / f"{name}.sbatch").read_text().splitlines()
    assert first == "#!/bin/bash" and all(line.startswith("#") for line in lines[:-1]) and lines[-1].startswith("exec ")
    if name == "run":
        words = lines[-1].split()[2:]
        assert parser_of(words).parse_args(words).requeue


def test_the_manifest_starts_what_autovaruna_run_understands() -> None:
    manifest = yaml.safe_load((EXAMPLES / "kubernetes" / "mpijob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    pods = manifest["spec"]["mpiReplicaSpecs"]
    (launcher,) = pods["Launcher"]["template"]["spec"]["containers"]
    words = [*launcher["command"], *launcher["args"]][1:]
    found = parser_of(words).parse_args(words)
    assert found.gpus_per_node == manifest["spec"]["slotsPerWorker"] and found.script == "train.py"
    (worker,) = pods["Worker"]["template"]["spec"]["containers"]
    assert "/dev/shm" in [each["mountPath"] for each in worker["volumeMounts"]]


class Cluster:
    """A Slurm of the nodes n1 and n2, and the folder of its jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        own = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
        outer = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.variables = {**outer, **QUIET, **own, "AUTOVARUNA_CONF_DIR": str(folder)}
        (folder / "train.py").write_text(script := SCRIPT.read_text())
        page = (ROOT / "docs" / "how-to" / "slurm.md").read_text()
        asks = page.split("```py\n")[1].split("```")[0].replace('"checkpoints"', "folder, lr_scheduler=scheduler")
        script = script.replace("import sys", "import subprocess\nimport sys")
        (folder / "asks.py").write_text(script.replace("state = ", f"{asks}state = "))
        (folder / "names.py").write_text(NAMES)
        (folder / "machines").write_text("127.0.0.1\n")
        (folder / "second").write_text("n2\n")

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.variables, cwd=self.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, name: str, options: str, command: str) -> str:
        """Submits a batch job that writes to ``name.out``; returns its number."""
        script = self.folder / f"{name}.sbatch"
        more = f"--output={name}.out --open-mode=append --requeue {options}"
        script.write_text(f"#!/bin/bash\n#SBATCH {more}\nexec {command}\n")
        return self.run("sbatch", "--parsable", str(script)).strip()

    def output(self, name: str) -> str:
        file = self.folder / f"{name}.out"
        return file.read_text() if file.exists() else ""

    def begun(self, name: str) -> list[int]:
        """Returns the step at which each run of a job has begun."""
        return [int(step) for step in re.findall(r"begin (\d+)\n", self.output(name))]

    def steps(self, name: str) -> list[int]:
        """Returns the steps that a job has done."""
        return [int(step) for step in re.findall(r"loss (\d+) \S+\n", self.output(name))]

    def wait_for(self, *words: str, name: str) -> None:
        """Waits until a job has printed all of some words."""
        wait_until(lambda: all(each in self.output(name) for each in words), lambda: f"{words} in {self.output(name)}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Returns one that all `JOBS` have been given to: what they wait for, they wait for together."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    if os.getuid() or not all(shutil.which(name, path=path) for name in PROGRAMS):
        pytest.skip("Slurm is not installed, or this is not root")
    find_mpirun()
    folder = Path(tempfile.mkdtemp(prefix="slurm"))  # munge wants all folders above its socket to be open
    folder.chmod(0o755)
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    held = [socket.socket() for _ in range(3)]  # so that nobody else gets their ports; the daemons may listen there
    for each in held:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, ports=ports))
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    found = Cluster(folder)
    files = ("key-file=key", "socket=munge", "pid-file=munge.pid", "seed-file=seed", "log-file=munge.log")
    munge = ["munged", "--foreground", "--force", *(f"--{each.replace('=', f'={folder}/')}" for each in files)]
    daemons = [munge, ["slurmctld", "-c", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
    started = []
    try:
        for command in daemons:
            started.append(subprocess.Popen(command, env={**found.variables, "PATH": path}, stderr=subprocess.DEVNULL))
            if command is munge:
                wait_until((folder / "munge").exists, lambda: "munge")
        wait_until(lambda: "idle" in found.run("sinfo", "-h", "-o", "%t %D") and "2" in found.run("sinfo", "-h"), str)
        for name, (command, _) in JOBS.items():
            found.submit(name, ALLOCATION, command)
        yield found
        found.run("scancel", "--user=root")
        wait_until(lambda: not found.run("squeue", "-h"), lambda: found.run("squeue"))
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(timeout=30)
        for each in held:
            each.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def trained(cluster: Cluster) -> Cluster:
    """Has run two jobs at once, which were signalled, have gone on, and were asked to end."""
    (cluster.folder / "memory").mkdir()
    words = f"{RUN} --no_standby --requeue --memory_folder memory --checkpoints requeued train.py 100000 0.1 requeued"
    options = f"--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --standalone --nproc-per-node {1 + WHOLE}"
    numbers = {
        "requeued": cluster.submit("requeued", "--nodes=1 --ntasks-per-node=2", words),
        "torchrun": cluster.submit("torchrun", "--nodes=1", f"torchrun {options} asks.py 100000 0.1 torchrun"),
    }
    for name, number in numbers.items():
        cluster.wait_for("loss 3 ", name=name)
        cluster.run("scancel", "--batch", "--signal=USR1", number)
    for name in numbers:
        wait_until(lambda name=name: cluster.begun(name)[1:], lambda name=name: cluster.output(name))  # type: ignore[misc]
    stop_after(cluster.folder, max(cluster.steps(name)[-1] for name in numbers) + 20)
    for name in numbers:
        cluster.wait_for("weights ", name=name)
    cluster.wait_for("the job has finished", name="requeued")
    return cluster


@pytest.mark.parametrize("name", ["requeued", "torchrun"])
def test_a_signalled_and_requeued_job_has_the_weights_of_one_that_ran_through(name: str, trained: Cluster) -> None:
    """The manager asks Slurm, or the ranks of torchrun do: that ends with status 1, whatever its ranks end with."""
    said = trained.output(name)
    first, second = trained.begun(name)
    assert first == 0 and second > 3, said
    steps = trained.steps(name)
    assert steps == list(range(len(steps))), said
    assert not differences(said, len(steps), 0, "nowhere"), said
    if name == "requeued":
        assert "SIGUSR1 came: status 75" in said and "asking Slurm to put this job into its queue again" in said


def test_usr1_ends_a_job_with_75_before_its_ranks_train(cluster: Cluster) -> None:
    """While its keepers start, or while its ranks import."""
    numbers = {}
    for name in ("keepers", "ranks"):
        (cluster.folder / f"{name}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(100)\n")
        (cluster.folder / f"memory-{name}").mkdir()
        command = f"{RUN} --no_standby --memory_folder memory-{name} {name}.py"
        numbers[name] = cluster.submit(name, "--nodes=1 --ntasks-per-node=2", command)
    wait_until(lambda: any((cluster.folder / "memory-keepers").iterdir()), lambda: cluster.output("keepers"))
    cluster.run("scancel", "--batch", "--signal=USR1", numbers["keepers"])
    cluster.wait_for("importing", name="ranks")
    cluster.run("scancel", "--batch", "--signal=USR1", numbers["ranks"])
    for name in numbers:
        cluster.wait_for("SIGUSR1 came: status 75", name=name)


@pytest.mark.parametrize("name", JOBS)
def test_ranks_run_on_the_hosts_of_the_allocation_or_on_those_that_are_named(cluster: Cluster, name: str) -> None:
    """Once, mpirun said of an address that its node is not present in the allocation."""
    if name == "pmix" and "pmix" not in cluster.run("srun", "--mpi=list"):
        pytest.skip("this Slurm has no PMIx")
    cluster.wait_for(*JOBS[name][1], name=name)
