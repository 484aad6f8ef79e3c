"""Start of the ranks of a program by ``triax run``: hosts, output, restarts, replicas and their coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..base.option_error import OptionError, refusal
from .base import Options, option
from .fault_tolerance import is_replica_name


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(Options):
    """Ranks of a program: their number on each host, their output, and their restarts."""

    module: bool = option(False, "Run the script as a module, as python -m.", flags=("-m", "--module"))
    no_python: bool = option(False, "Run the script as a program, without Python.")
    nproc: str | None = option(
        None, "Processes per host: a number, gpu, cpu or auto. Default: the slots in the hostfile, the GPUs, or 1."
    )
    processes: int | None = option(None, "Processes on all hosts together.", least=1, flags=("-np", "--processes"))
    nnodes: str = option("", "Number of hosts; MIN:MAX lets hosts join and leave.")
    hostfile: str = option(
        "", "Start on all hosts of this file, `host slots=N` per line, or this list: host1:2,host2:2."
    )
    include: str = option("", "Only these slots: host1:0,2@host2.")
    exclude: str = option("", "All but these slots: host1:1@host2.")
    node_rank: int | None = option(None, "Rank of this host, if you start each by hand.", least=0)
    master_addr: str = option("", "Address of the first host. Default: its name in the hostfile.")
    master_port: int = option(29500, "Port on the first host.", least=1, most=65535)
    launcher: str = option("ssh", "How to start commands on hosts: ssh, or a command with {host} and {command} in it.")
    launcher_args: tuple[str, ...] = option((), "Further options of ssh, in quotes. Repeatable.")
    no_local_rank: bool = option(False, "Do not pass --local_rank=N to a script that has this option.")
    export: tuple[str, ...] = option((), "Environment variable for all ranks, NAME or NAME=VALUE. Repeatable.")
    max_restarts: int = option(0, "Number of restarts after failures.", least=0)
    log_dir: str = option("runs/logs", "Folder for rank-0.log, ...; none: print all here.")
    tee: str = option("0", "Ranks whose output is also printed here: 0, or 0,3, or all, or none.")
    threads: int | None = option(
        None, "Threads per process. Default: OMP_NUM_THREADS, or a share of the cores.", least=1
    )
    timeline: Path | None = option(
        None, "Write a trace of all ranks to this file, for ui.perfetto.dev. Survives crashes.", writes=("",)
    )
    host_timeout: float = option(15.0, "Seconds without a heartbeat after which a host counts as lost.", least=3)
    grace: float = option(30.0, "Seconds for ranks to save and exit after SIGTERM.", least=0)
    wait: float = option(600.0, "Seconds to wait for all hosts at the start.", least=1)
    rdzv_endpoint: str = option("", "Rendezvous address, as in torchrun: host:29400.")
    rdzv_conf: tuple[str, ...] = option((), "Rendezvous settings, as in torchrun: key=value,... Repeatable.")

    @property
    def rendezvous(self) -> dict[str, str]:
        """Settings of ``rdzv_conf``, of which ``backend=static`` alone means no rendezvous, as in torchrun.

        Raises:
            OptionError: a setting without a value.
        """
        found = {}
        for setting in filter(None, ",".join(self.rdzv_conf).split(",")):
            key, equals, value = setting.partition("=")
            if not equals:
                raise refusal(f"<rdzv_conf> has {setting!r}, which has no value. Write key=value,key=value")
            found[key.strip()] = value.strip()
        return {} if found == {"backend": "static"} else found

    @property
    def log_folder(self) -> Path | None:
        """Folder of the log files; None: there are none."""
        return None if self.log_dir == "none" else Path(self.log_dir)


@dataclass(frozen=True, kw_only=True)
class CoordinatorOptions(Options):
    """When a coordinator lets the replicas of a run take a step without those that are late or lost."""

    min_replicas: int = option(1, "Smallest number of replicas with which steps are taken.", least=1)
    heartbeat_timeout: float = option(
        2.0, "Seconds without a heartbeat after which a replica counts as lost.", least=0.1
    )
    straggler_timeout: float = option(
        60.0, "Seconds to wait for a late replica that still sends heartbeats.", least=0.1
    )


@dataclass(frozen=True, kw_only=True)
class CoordinatorServer(CoordinatorOptions):
    """Coordinator as a process of its own."""

    port: int = option(29510, "TCP port.", least=0, most=65535)
    host: str = option(
        "127.0.0.1", "Address of this host to listen on. The default reaches replicas on this host alone."
    )


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(CoordinatorOptions):
    """Replicas of a run on this host, each with ranks of its own, and their coordinator."""

    replicas: str = option(
        "",
        "Replicas of fault_tolerance on this host, of --nproc processes each: a number, or names a,b. If one dies, it "
        "is started again, up to --max-restarts times, while the others train. --min-replicas, "
        "--heartbeat-timeout and --straggler-timeout are for them.",
    )
    coordinator: str = option(
        "", "With --replicas: coordinator of several hosts, HOST:PORT. Default: one is started here.", needs="replicas"
    )

    def check(self) -> None:
        """Check the names of the replicas, and that nothing is given for replicas that there are not."""
        names = self.names
        if self.replicas and (len(set(names)) < len(names) or not names or not all(map(is_replica_name, names))):
            raise OptionError("replicas", self.replicas, "give a number of at least 1, or different names: a,b,c")
        for name in ("min_replicas", "heartbeat_timeout", "straggler_timeout"):
            if self.changes(name) and not self.replicas:
                raise OptionError(name, getattr(self, name), "it is for <replicas>: give them, or leave it out")

    @property
    def names(self) -> list[str]:
        """Names of the replicas."""
        numbered = self.replicas.isdecimal()
        return [str(each) for each in range(int(self.replicas))] if numbered else self.replicas.split(",")
