"""``triax coordinator`` and ``triax drain``: replicas that leave and join a run at a step."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError
from ..base.ports import LOOPBACK
from ..grid.environment import run_secret
from ..grid.launcher.replicas import drain as drain_replica

PORT = 29510


def coordinator(
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port.")] = PORT,
    least: Annotated[int, typer.Option(min=1, help="Smallest number of replicas with which steps are taken.")] = 1,
    silence: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a heartbeat after which a replica counts as lost.")
    ] = 2.0,
    patience: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for a late replica that still sends heartbeats.")
    ] = 60.0,
    host: Annotated[
        str, typer.Option(help="Address of this host to listen on. The default reaches replicas on this host alone.")
    ] = LOOPBACK,
) -> None:
    """Run the coordinator of a run's replicas until it is stopped. It answers those that know TRIAX_SECRET alone."""
    from ..plugins.fault_tolerance.coordinator import Coordinator  # triax runs without this folder

    secret = run_secret()
    try:
        server = Coordinator(port, least, silence, patience, secret, host)
    except OSError as error:
        raise ConfigError(f"the coordinator cannot listen on {host}, port {port}: {error.strerror or error}") from error
    typer.echo(f"coordinator: {server.address}")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    while not ended.wait(0.5):
        pass
    server.close()


def drain(
    name: Annotated[str, typer.Argument(help="Name of the replica: a number from 0.")],
    log_dir: Annotated[str, typer.Option(help="Log folder of the run, as of triax run.")] = "runs/logs",
    wait: Annotated[float, typer.Option(min=0.1, help="Seconds to wait until it has left.")] = 120.0,
) -> None:
    """Ask a replica of triax run --replicas to leave the run after its step; the others continue."""
    drain_replica(name, Path(log_dir), wait)
    typer.echo(f"replica {name} has left")
