"""Hosts and processes that the options of ``triax run`` ask for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...base.files import read_text
from ...options.launch import LaunchOptions
from .hosts import Hosts, Slots, check_host, first_slots, limit_slots, listed, parse_hostfile, parse_nodes, select
from .launch import cores, own_address

_HOST_LIST = re.compile(r"[^,\s]+:\d+(,[^,\s]+:\d+)*")


def placed(options: LaunchOptions) -> tuple[LaunchOptions, Slots | None]:
    """Return the options for this host alone, or the slots of several hosts that are to be started from here.

    Raises:
        ConfigError: the options name no possible hosts or processes.
    """
    if options.master_addr:
        check_host(options.master_addr, "--master-addr")
    slots = _slots(options)
    if slots is None:
        return options if options.processes is None else options.changed(nproc=str(options.processes)), None
    if is_elastic(options):
        raise ConfigError("--hostfile is a fixed list of hosts. Leave out --nnodes MIN:MAX and --rdzv-...")
    if list(slots) == ["localhost"]:
        chosen = slots["localhost"]
        selected = [f"CUDA_VISIBLE_DEVICES={listed(chosen)}"] if options.include or options.exclude else []
        return options.changed(nproc=str(len(chosen)), nnodes="", export=(*selected, *options.export)), None
    address = options.master_addr or next(iter(slots))
    if len(slots) > 1 and not options.master_addr and address in ("localhost", "127.0.0.1"):
        raise ConfigError("The first host is localhost, which the others cannot reach. Give --master-addr.")
    placed = options.changed(master_addr=address, nnodes=str(len(slots)))
    if options.node_rank is None:
        return placed, slots
    own_slots = list(slots.values())[node_rank(placed)]
    return placed.changed(nproc=str(len(own_slots))), None


def is_elastic(options: LaunchOptions) -> bool:
    """Return True if hosts may join and leave."""
    least, most = number_of_hosts(options)
    return least != most or bool(options.rdzv_endpoint or options.rendezvous)


def number_of_hosts(options: LaunchOptions) -> tuple[int, int]:
    """Return the least and the most number of hosts."""
    return parse_nodes(options.nnodes) if options.nnodes else (1, 1)


def node_rank(options: LaunchOptions) -> int:
    """Return the rank of this host, if the user starts ``triax run`` on each host by hand.

    Raises:
        ConfigError: the rank or the first host's address is missing, or the rank is too large.
    """
    if options.node_rank is None or not options.master_addr:
        raise ConfigError(
            f"--nnodes {options.nnodes} needs --hostfile, to start all hosts from here. To start each host by hand, "
            "give --node-rank and --master-addr on each."
        )
    hosts, _ = number_of_hosts(options)
    if options.node_rank >= hosts:
        raise ConfigError(f"You gave --node-rank {options.node_rank}, but {hosts} hosts count from 0 to {hosts - 1}.")
    return options.node_rank


def fixed_hosts(options: LaunchOptions, names: tuple[str, ...]) -> Hosts | None:
    """Return the fixed list of hosts that the ranks are on; None: this host alone.

    Args:
        options: the options.
        names: names of all hosts, for messages; (): they are numbered.
    """
    count, _ = number_of_hosts(options)
    if count == 1:
        return None
    names = names or tuple(f"host {number}" for number in range(count))
    address, port = options.master_addr, options.master_port
    return Hosts(names, node_rank(options), address, port, options.host_timeout, options.wait)


def rendezvous(options: LaunchOptions) -> dict[str, Any]:
    """Return the arguments of torch's rendezvous, through which hosts join and leave an elastic run.

    Raises:
        ConfigError: its address is missing, or not one of a host.
    """
    endpoint, given = options.rdzv_endpoint or options.master_addr, options.rendezvous
    if not endpoint:
        raise ConfigError("--rdzv-endpoint is missing. Give host:port, and the same one on every host.")
    host = endpoint.rpartition(":")[0] or endpoint
    if given.get("store_type", "tcp") == "tcp":  # otherwise the endpoint is a file
        check_host(host.removeprefix("[").removesuffix("]"), "--rdzv-endpoint")
    least, most = number_of_hosts(options)
    return {
        "backend": "c10d",
        "endpoint": endpoint,
        "run_id": "triax",
        "min_nodes": least,
        "max_nodes": most,
        "local_addr": own_address(host),
        **given,
    }


def processes(nproc: str | None) -> int:
    """Return the number of processes on this host.

    Raises:
        ConfigError: ``nproc`` is no number of processes.
    """
    if nproc is not None and nproc.isdecimal() and int(nproc) > 0:
        return int(nproc)
    if nproc == "cpu":
        return cores()
    if nproc not in (None, "gpu", "auto"):
        raise ConfigError(f"--nproc is {nproc!r}, but it must be a number of at least 1, or gpu, cpu or auto.")
    from ..devices import accelerators

    count = accelerators()
    if nproc == "gpu" and not count:
        raise ConfigError("You gave --nproc gpu, but this host has no GPU. Give a number, or cpu.")
    return count or (cores() if nproc == "auto" else 1)


def _slots(options: LaunchOptions) -> Slots | None:
    """Return the slots to use on each host, host -> indices of slots. None if the options name no hosts."""
    hosts, nproc, total = options.hostfile, options.nproc, options.processes
    if not hosts and not (options.include or options.exclude):
        return None
    if not hosts:
        available = {"localhost": processes(nproc if total is None else str(total))}
        nproc = total = None
    elif Path(hosts).exists() or not _HOST_LIST.fullmatch(hosts):
        try:
            text = read_text(hosts)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The hostfile {hosts} cannot be read because of this error: {error}") from error
        available = parse_hostfile(text, hosts)
    else:
        lines = [host.rpartition(":") for host in hosts.split(",")]
        available = parse_hostfile("\n".join(f"{host} slots={count}" for host, _, count in lines), f"-H {hosts}")
    slots = select(available, options.include, options.exclude)
    if nproc is not None and not nproc.isdecimal():
        raise ConfigError(
            f"You gave --nproc {nproc}, but the hostfile has the slots of each host. Give a number, or leave it out."
        )
    if ":" in options.nnodes:
        raise ConfigError(
            f"--nnodes is {options.nnodes}, but the hostfile is a fixed list. Give a number, or leave it out."
        )
    nodes = number_of_hosts(options)[0] if options.nnodes else None
    slots = limit_slots(slots, nodes, int(nproc) if nproc else None)
    return slots if total is None else first_slots(slots, total)
