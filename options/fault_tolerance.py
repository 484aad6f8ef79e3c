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
        None, "Name of this replica, equal on its ranks alone; None: TRIAX_REPLICA, which triax run --replicas sets."
    )
    active: int | None = option(
        None, "Number of replicas that contribute; further ones are spare, with equal weights. None: all.", least=1
    )
    zero: int = option(
        0,
        "Stage of ZeRO over the replicas: 1 cuts the optimizer state and the master weights among them. 0: each holds "
        "all.",
        least=0,
        most=3,
    )
    copies: int = option(
        1,
        "With zero: replicas that hold a copy of each one's part, in host memory. If all holders of a part are lost in "
        "one step, the run ends, and starts again from a checkpoint.",
        least=0,
        needs="zero",
    )
    timeout: float = option(
        60.0, "Seconds after which a sum over replicas fails, where a connection stands and nothing comes.", above=0
    )
    silence: float = option(
        2.0, "Seconds without a heartbeat after which the coordinator takes a replica for lost.", above=0
    )
    give_up: float = option(120.0, "Seconds without a meeting after which a replica stops with an error.", above=0)
    folder: str | None = option(
        None,
        "Folder of the history of members, NAME.jsonl of each replica; None: it is not written, and by a training file "
        "into history in the run's folder.",
    )
    replay: str | None = option(
        None, "History file of a run to replay: its members contribute at its steps, and none is lost."
    )

    def check(self) -> None:
        """Check that the replica's name can be a file's name, and that gradients and weights are whole."""
        if self.zero > 1:
            what = "gradients" if self.zero == 2 else "gradients and weights"
            raise OptionError(
                "zero",
                self.zero,
                f"replicas keep whole {what}, because those that are left sum their gradients again when one is lost, "
                f"and no layer waits for another replica: give 1, and cut {what} within each replica (zero="
                f"{self.zero} of the engine, on a data axis)",
            )
        if self.replica is not None and (not self.replica or set(self.replica) & set("/\\\n\0")):
            raise OptionError("replica", self.replica, "give a name without a slash, such as 0")

    def own(self, folder: str, name: str | None) -> str:
        """Return the folder of one replica in a folder of the run; None as its name: the run's folder."""
        return folder if name is None else f"{folder}/replica-{name}"
