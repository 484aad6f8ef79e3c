"""Replicas that come and go while the others train."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.option_error import OptionError
from .base import Options, option


@dataclass(frozen=True, kw_only=True)
class FaultTolerance(Options):
    """Replicas that leave and join a run at a step; each one is a group of processes of its own."""

    coordinator: str | None = option(
        None, "Address of the coordinator, host:port; None: TRIAX_COORDINATOR, which triax run --replicas sets."
    )
    replica: str | None = option(
        None,
        "Name of this replica, equal on all its ranks and on no others; None: TRIAX_REPLICA, which triax run "
        "--replicas sets.",
    )
    active: int | None = option(
        None,
        "Number of replicas that contribute; further ones are spares that hold equal weights. None: all contribute.",
        least=1,
    )
    zero: int = option(
        0,
        "Stage of ZeRO over the replicas. 1: they shard the optimizer state and the master weights; 0: each replica "
        "holds all.",
        least=0,
        most=3,
    )
    copies: int = option(
        1,
        "With zero: number of other replicas that hold a copy of a replica's shard, in host memory. If one step loses "
        "a shard and all its copies, the run ends; start it again from a checkpoint.",
        least=0,
        needs="zero",
    )
    timeout: float = option(
        60.0, "Seconds after which a sum over replicas fails if a connected replica sends nothing.", above=0
    )
    heartbeat_timeout: float = option(
        2.0, "Seconds without a heartbeat after which the coordinator treats a replica as lost.", above=0
    )
    give_up: float = option(120.0, "Seconds without a meeting after which a replica stops with an error.", above=0)
    folder: str | None = option(
        None,
        "Folder of the history of members, a file NAME.jsonl of each replica. None: no history; in a training file: "
        "the folder history in the run's folder.",
    )
    replay: str | None = option(
        None, "History file of a run to replay: at each step, the replicas of that run contribute, and none is lost."
    )

    def check(self) -> None:
        """Check that the replica's name can be a file's name, and that gradients and weights are whole."""
        if self.zero > 1:
            what = "gradients" if self.zero == 2 else "gradients and weights"
            raise OptionError(
                "zero",
                self.zero,
                f"replicas keep whole {what}, because they sum their gradients again if one is lost, and no layer may "
                f"wait for another replica: give 1, and shard {what} within each replica (zero={self.zero} of the "
                "engine, on a data axis)",
            )
        if self.replica is not None and not is_replica_name(self.replica):
            raise OptionError("replica", self.replica, "give a name without a slash, such as 0")

    def own(self, folder: str, name: str | None) -> str:
        """Return the folder of one replica in a folder of the run; None as its name: the run's folder."""
        return folder if name is None else f"{folder}/replica-{name}"


def is_replica_name(name: str) -> bool:
    """Return True if a text can be the name of a replica, which is a part of the names of its files."""
    return bool(name) and not set(name) & set("/\\\n\0")
