"""Ranks of a program in the three places of ``triax run``: on this host, on hosts that this one drives, as replicas."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...base.ports import LOOPBACK, listen
from ...options.base import declared
from ...options.launch import CoordinatorOptions, CoordinatorServer, LaunchOptions, ReplicaOptions
from ...options.words import words_of
from ..environment import given_threads, run_secret
from .hosts import Slots, listed, parse_ranks
from .launch import Outcome, outcome_of
from .placement import fixed_hosts, is_elastic, processes, rendezvous
from .program import LaunchedProgram
from .remote import exported_variables, host_command, run_on_hosts, template_of
from .replica_jobs import run_replicas, start_coordinator

_PRELOAD = ("triax.compat.deepspeed.from_config", "triax.pipe", "triax.tensor_parallel")
_TRIAX_RUN = (sys.executable, "-m", "triax.cli.main", "run")


def run_here(
    options: LaunchOptions, program: LaunchedProgram, variables: Mapping[str, str], driven: tuple[str, ...] = ()
) -> Outcome:
    """Run a program on the ranks of this host, alone or as one of several, and wait.

    Args:
        options: options for this host.
        program: the program.
        variables: further environment variables of the ranks.
        driven: names of all hosts, if a launcher elsewhere has started this one; it ends when that one has ended.

    Raises:
        ConfigError: an option cannot be used.
    """
    settings: dict[str, Any] = {"restarts": options.max_restarts, "grace": options.grace}
    settings["environment"] = {**exported_variables(os.environ, options.export, ()), **variables}
    settings["threads"] = given_threads() if options.threads is None else options.threads
    shown = parse_ranks(options.tee, "--tee")
    if is_elastic(options):
        settings["rendezvous"] = rendezvous(options)
    else:
        settings["hosts"] = fixed_hosts(options, driven)
    if options.log_folder is not None:
        settings |= {"logs": options.log_folder, "tee": shown or ()}
    ranks = processes(options.nproc)
    if driven:
        _stop_with_driver()
    return outcome_of(program.target, *program.arguments, ranks=ranks, preload=_PRELOAD, **settings)


def run_driven(options: LaunchOptions, program: LaunchedProgram, slots: Slots) -> Outcome:
    """Start ``triax run`` on each host, through ssh or another launcher, and wait.

    Args:
        options: options for all hosts.
        program: the program.
        slots: the slots of each host: indices of its GPUs, if the options select some, or only their number.

    Raises:
        ConfigError: an option cannot be used.
    """
    parse_ranks(options.tee, "--tee")  # before a host starts
    template, commands = template_of(options.launcher, options.launcher_args), {}
    extra = exported_variables(os.environ, options.export, ())
    for node, (host, chosen) in enumerate(slots.items()):
        selected = {"CUDA_VISIBLE_DEVICES": listed(chosen)} if options.include or options.exclude else {}
        there = _for_a_launcher(
            options,
            node_rank=node,
            nproc=str(len(chosen)),
            processes=None,
            hostfile="",
            include="",
            exclude="",
            export=tuple(f"{name}={value}" for name, value in {**selected, **extra}.items()),
        )
        words = [*_TRIAX_RUN, *words_of(there), "--driven", ",".join(slots), *program.words]
        commands[host] = host_command(template, host, words, exported_variables(os.environ), os.getcwd())
    return run_on_hosts(commands, options.max_restarts, options.host_timeout, options.grace)


def run_as_replicas(options: LaunchOptions, replicas: ReplicaOptions, program: LaunchedProgram) -> int:
    """Run replicas as jobs of their own on this host until all have ended; return the exit code.

    Raises:
        ConfigError: an option is for another kind of run.
    """
    if options.given & {"nnodes", "hostfile", "node_rank", "rdzv_endpoint", "processes", "timeline"}:
        raise ConfigError(
            "--replicas starts jobs only on this host: give --nproc, and start the other hosts' replicas there, "
            "with other names and --coordinator HOST:PORT"
        )
    logs, coordinator, serve = options.log_folder or Path("runs/logs"), replicas.coordinator, None
    if coordinator:
        secret = run_secret().decode()
    else:
        secret = os.environ.get("TRIAX_SECRET") or secrets.token_hex(16)
        with listen(LOOPBACK) as probe:
            port = int(probe.getsockname()[1])
        coordinator = f"{LOOPBACK}:{port}"
        limits = {each.name: getattr(replicas, each.name) for each in declared(CoordinatorOptions)}
        server = CoordinatorServer(port=port, **limits)
        serve = partial(start_coordinator, server, secret, logs / "coordinator.log")

    def command(name: str) -> list[str]:
        folder = "none" if options.log_folder is None else str(logs / f"replica-{name}")
        launcher_options = _for_a_launcher(options, log_dir=folder, max_restarts=0, master_addr="", master_port=29500)
        return [*_TRIAX_RUN, *words_of(launcher_options), *program.words]

    say = partial(print, file=sys.stderr, flush=True)
    restarts, grace = options.max_restarts, options.grace
    return run_replicas(command, replicas.names, coordinator, restarts, logs, grace, say, serve, secret)


def _for_a_launcher(options: LaunchOptions, **changes: Any) -> LaunchOptions:
    """Return the options of a launcher that is started here, for a program that has its arguments already."""
    done = {"module": False, "no_python": False, "no_local_rank": True, "launcher": "ssh", "launcher_args": ()}
    return options.changed(**done, **changes)


def _stop_with_driver() -> None:
    """Send SIGTERM to this launcher when its standard input closes: the process that started it has ended."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="triax watches the driver").start()
