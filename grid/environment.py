"""Environment variables of launchers: torchrun, Open MPI, MPICH and Slurm. No torch.

Only this file and the launcher read the environment. All other code is given a ``Grid``.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..base.errors import ConfigError

# Variables of rank, number and rank on the host of launchers that are not supported: Flux, Cray's PALS, MVAPICH, jsrun.
_OTHERS = (
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
)
_MPI_SIZE = "OMPI_COMM_WORLD_SIZE"
_MOST, _PORTS = 2**31, 2**16
TIMELINE = "TRIAX_TIMELINE"  # set by the launcher for its ranks: the folder of the timeline's parts


@dataclass(frozen=True)
class Environment:
    """Rank and rendezvous address of this process, as its launcher set them.

    Attributes:
        rank: rank of this process.
        world_size: number of processes, on all hosts.
        local_rank: rank of this process among those of its host.
        master_addr, master_port: address and port of the store, at which the processes meet.
        restarts: number of times that the launcher has restarted the processes.
        launcher: name of the launcher, for messages.
        agent_store: True if the launcher serves the store; False: rank 0 does.
        names: names of the launcher's variables for the rank and the number of processes.
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    restarts: int
    launcher: str
    agent_store: bool = False
    names: tuple[str, str] = field(default=("RANK", "WORLD_SIZE"), compare=False)


def read_environment(environ: Mapping[str, str] | None = None) -> Environment | None:
    """Read torchrun's variables, else Open MPI's, MPICH's or Slurm's; None if no launcher started this process.

    Raises:
        ValueError: some of a launcher's variables are missing; the message names them.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return _environment(
            env, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", _whole(env, "TORCHELASTIC_RESTART_COUNT", "0")
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        names = ("OMPI_COMM_WORLD_RANK", _MPI_SIZE, "OMPI_COMM_WORLD_LOCAL_RANK")
        return _mpi(env, *names, how="-x MASTER_ADDR=")
    if "PMI_RANK" in env and "MPI_LOCALRANKID" in env:  # srun may set the first, and never the second
        return _mpi(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", how="-genv MASTER_ADDR ")
    if "SLURM_PROCID" in env and ("SLURM_STEP_NUM_TASKS" in env or "SLURM_NTASKS" in env):
        # Jobs that share a host must not share a port: derive it from the job's number.
        port = 20000 + _whole(env, "SLURM_JOB_ID", "0") % 40000
        size = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
        restarts = _whole(env, "SLURM_RESTART_COUNT", "0")
        return _environment(env, "srun", "SLURM_PROCID", size, "SLURM_LOCALID", restarts, _first_host(env), port)
    for rank, size, local in _OTHERS:
        if rank in env and env.get(size, "1") not in ("0", "1"):
            raise ValueError(
                f"{rank}={env[rank]} and {size}={env[size]} are set, but triax does not read the variables of this "
                f"launcher, so that each process would run alone: let it start sh -c 'RANK=${rank} WORLD_SIZE=${size} "
                f"LOCAL_RANK=${local} MASTER_ADDR=<host of rank 0> exec python train.py', or {_start_anew(rank, size)}"
            )
    for name, other in (("WORLD_SIZE", "RANK"), ("RANK", "WORLD_SIZE"), (_MPI_SIZE, "OMPI_COMM_WORLD_RANK")):
        if env.get(name, "1") not in ("0", "1"):
            raise ValueError(
                f"{name}={env[name]} is set, but {other} is not, so that this process would run alone: "
                f"{_start_anew(name)}"
            )
    return None


def _environment(
    env: Mapping[str, str],
    launcher: str,
    rank: str,
    size: str,
    local_rank: str,
    restarts: int = 0,
    address: str = "127.0.0.1",
    port: int = 29500,
) -> Environment:
    """Read the variables of one launcher.

    Args:
        env: the environment variables.
        launcher: the launcher's name.
        rank, size, local_rank: the names of its variables for these numbers.
        restarts: the number of restarts.
        address, port: used if MASTER_ADDR and MASTER_PORT are not set.
    """
    if size not in env:
        raise ValueError(f"{rank}={env[rank]} is set, but {size} is not: {_start_anew(rank)}")
    number, count = _whole(env, rank), _whole(env, size)
    if not 0 <= number < count:
        raise ValueError(
            f"{rank}={number} and {size}={count} are set, but ranks go from 0 to the number of processes less 1: "
            f"{_start_anew(rank, size)}"
        )
    return Environment(
        rank=number,
        world_size=count,
        local_rank=_whole(env, local_rank, "0"),
        master_addr=env.get("MASTER_ADDR") or address,
        master_port=_whole(env, "MASTER_PORT", str(port), _PORTS),
        restarts=restarts,
        launcher=launcher,
        names=(rank, size),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def absent_processes(environment: Environment) -> str:
    """Return what the environment says of the other processes, and what to type if they were never started."""
    (rank, size), number = environment.names, environment.world_size
    return (
        f"{rank}={environment.rank} and {size}={number} say that this is process {environment.rank} of {number}, which "
        f"meet at {environment.master_addr}:{environment.master_port}, and not all of them are there. If this program "
        f"was started once, {_start_anew(rank, size, processes=number)}"
    )


def _start_anew(*names: str, processes: int = 4) -> str:
    """Return what to type for all processes, and for one alone, in which a launcher's variables are left over."""
    return (
        f"start all processes by a launcher (srun python train.py, torchrun --nproc-per-node {processes} train.py, or "
        f"triax run --nproc {processes} train.py), or type unset {' '.join(names)} to run one process"
    )


def _whole(env: Mapping[str, str], name: str, default: str = "", most: int = _MOST) -> int:
    """Return a variable's whole number.

    Raises:
        ValueError: the variable is no whole number, or it is below 0, or ``most`` or more.
    """
    text = env.get(name, default)
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r:.60} is no whole number: {_start_anew(name)}") from None
    if not 0 <= number < most:
        raise ValueError(f"{name}={text:.60} is set, but it must be from 0 to {most - 1}: {_start_anew(name)}")
    return number


def _mpi(env: Mapping[str, str], rank: str, size: str, local_rank: str, how: str) -> Environment:
    """Read the variables of Open MPI or MPICH, whose names are given.

    Raises:
        ValueError: several hosts, and MASTER_ADDR is not set.
    """
    local = "OMPI_COMM_WORLD_LOCAL_SIZE" if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") else "MPI_LOCALNRANKS"
    local_size = _whole(env, local, "1")
    if "MASTER_ADDR" not in env and local_size < _whole(env, size, "1"):
        raise ValueError(
            f"mpirun started {env[size]} processes, {local_size} of them on this host, and MASTER_ADDR is not set: "
            f"add {how}<host of rank 0> to mpirun"
        )
    if (job := env.get("PMIX_NAMESPACE")) is None:
        return _environment(env, "mpirun", rank, size, local_rank)
    # Two jobs on one host must not share a port; Open MPI has a name for each job.
    port = 20000 + zlib.crc32(job.encode()) % 10000
    return _environment(env, "mpirun", rank, size, local_rank, port=port)


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """Return this process's rank on its host, ``LOCAL_RANK`` under torchrun; 0 if no launcher sets it."""
    env = os.environ if environ is None else environ
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    return int(next((env[name] for name in names if name in env), "0"))


def local_place(environ: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Return (this process's rank on its host, number of ranks on this host); None if the launcher does not set both.

    Slurm lists the tasks of all hosts: ``2(x3),1`` means 2 on each of three hosts and 1 on the fourth.
    """
    env = os.environ if environ is None else environ
    for rank, size in (
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_SIZE"),  # of other launchers
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if rank in env and size in env:
            return _whole(env, rank), _whole(env, size)
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if tasks is None or "SLURM_LOCALID" not in env or "SLURM_NODEID" not in env:
        return None
    sizes: list[int] = []
    node = _whole(env, "SLURM_NODEID")
    for word in tasks.split(","):
        count, _, hosts = word.partition("(x")
        sizes += [int(count)] * int(hosts.rstrip(")") or "1")
    return (_whole(env, "SLURM_LOCALID"), sizes[node]) if node < len(sizes) else None


def loopback_interface() -> str | None:
    """Return the name of the loopback interface; None if there is none."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def loopback_variables() -> dict[str, str]:
    """Return the variables with which gloo and NCCL listen on the loopback interface alone."""
    interface = loopback_interface()
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def stay_on_this_host(ranks: int) -> bool:
    """Make gloo and NCCL listen on the loopback interface alone, if all ranks are on this host; return True if so.

    Variables that the user has set stay.
    """
    rank_and_count = local_place()
    alone = rank_and_count is not None and rank_and_count[1] == ranks
    for name, value in (loopback_variables() if alone else {}).items():
        os.environ.setdefault(name, value)
    return alone


def replica_name() -> str | None:
    """Return the name of this process's replica (``triax run --replicas``); None without one."""
    return os.environ.get("TRIAX_REPLICA")


def coordinator_address() -> str | None:
    """Return the address of the coordinator of replicas (``triax run --replicas``); None without one."""
    return os.environ.get("TRIAX_COORDINATOR")


def run_secret() -> bytes:
    """Return the secret of a run with replicas that come and go (``triax run --replicas`` makes one).

    Raises:
        ConfigError: TRIAX_SECRET is not set.
    """
    if not (text := os.environ.get("TRIAX_SECRET")):
        raise ConfigError(
            "the variable TRIAX_SECRET is not set, and the coordinator answers those that know the run's secret alone: "
            "type export TRIAX_SECRET=TEXT on every host, with one random text of 16 letters or more"
        )
    return text.encode()


def timeline_folder() -> str | None:
    """Return the folder for the parts of a timeline (``triax run --timeline``); None if none is recorded."""
    return os.environ.get(TIMELINE)


def leave_name(rank: int, name: str) -> None:
    """Give triax's launcher this rank's name, e.g. ``rank 1 (pipe 0, ...)``. No effect under another launcher."""
    folder = os.environ.get("TRIAX_LAUNCH_FOLDER")
    if folder and Path(folder).is_dir():
        Path(folder, f"name-{rank}").write_text(name)


def slurm_job() -> str | None:
    """Return the number of the Slurm job of this process; None outside Slurm."""
    return os.environ.get("SLURM_JOB_ID")


def resident_peak() -> int:
    """Return the peak resident memory of this process in bytes, the interpreter and all libraries included."""
    try:
        # Not getrusage: on Linux the peak of a forked process starts with its parent's.
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_memory() -> int:
    """Return the resident memory of this process in bytes; its peak where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resident_peak()


def host_memory(free: bool = False) -> int:
    """Return the bytes of the host's memory, or of the part that is free."""
    return os.sysconf("SC_AVPHYS_PAGES" if free else "SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _first_host(env: Mapping[str, str]) -> str:
    """Return the first host of Slurm's list: ``node[03-05,9],other`` -> ``node03``."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    if not nodes:
        return "127.0.0.1"
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    assert match is not None  # the pattern takes any text that is not empty and starts with a name
    name, first, tail = match.groups()
    return name + (first or "") + (tail or "" if first else "")


def socket_interfaces() -> dict[str, str]:
    """Return the variables that name the network interface of gloo and NCCL, if they are set."""
    return {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ}


def given_threads() -> int | None:
    """Return the number of threads per process that ``OMP_NUM_THREADS`` gives; None without it."""
    variable = os.environ.get("OMP_NUM_THREADS", "")
    return int(variable) if variable.isdecimal() else None
