"""``triax replicas``: replicas that leave and join a run at a step."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError
from ..grid.environment import run_secret
from ..options.launch import CoordinatorServer
from .flags import with_flags
from .foreign_options import Command
from .verbs import group

replicas = group("replicas")


@replicas.command(cls=Command)
@with_flags
def coordinator(options: CoordinatorServer) -> None:
    """Run the coordinator of a run's replicas until it is stopped. It answers those that know TRIAX_SECRET alone."""
    from ..plugins.fault_tolerance.coordinator import Coordinator  # triax runs without this folder

    secret = run_secret()
    try:
        server = Coordinator(
            options.port,
            options.min_replicas,
            options.heartbeat_timeout,
            options.straggler_timeout,
            secret,
            options.host,
        )
    except OSError as error:
        where = f"{options.host}, port {options.port}"
        raise ConfigError(f"the coordinator cannot listen on {where}: {error.strerror or error}") from error
    typer.echo(f"coordinator: {server.address}")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    while not ended.wait(0.5):
        pass
    server.close()


@replicas.command(cls=Command)
def drain(
    name: Annotated[str, typer.Argument(help="Name of the replica: a number from 0.")],
    log_dir: Annotated[str, typer.Option(help="Log folder of the run, as of triax run.")] = "runs/logs",
    wait: Annotated[float, typer.Option(min=0.1, help="Seconds to wait until it has left.")] = 120.0,
) -> None:
    """Ask a replica of triax run --replicas to leave the run after its step; the others continue."""
    from ..grid.launcher.replica_jobs import drain as drain_replica

    drain_replica(name, Path(log_dir), wait)
    typer.echo(f"replica {name} has left")
