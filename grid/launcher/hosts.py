"""Hosts and their slots: a hostfile, ``--include`` and ``--exclude``. No torch.

worker-1 slots=4        # a name or an address, and the number of processes on it
worker-2 slots=4

--include "worker-1:0,2@worker-2"      slots 0 and 2 of worker-1, and all slots of worker-2
--exclude "worker-2:1"                 all slots but slot 1 of worker-2
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...base.errors import ConfigError, nearest

Slots = dict[str, tuple[int, ...]]  # host -> the slots to use, in the order of the hostfile

_LINE = re.compile(r"(?P<host>[^\s=]+)\s+slots=(?P<slots>\d{1,5})")
_HOST = re.compile(r"(\w[\w.-]*@)?[\w:][\w.:%-]*")  # with a user for ssh; a name, or an address also of IPv6
_HOW = "write one line for each host, such as `worker-1 slots=4`"


@dataclass(frozen=True)
class Hosts:
    """A fixed list of hosts, and the address of their rendezvous.

    Attributes:
        names: names of all hosts, in order. The launcher of the first host runs the rendezvous store.
        node: index of this host.
        address, port: address and port of the store on the first host.
        lost: seconds without a heartbeat after which a host counts as lost.
        patience: seconds to wait for all hosts, at the start and after one was lost.
    """

    names: tuple[str, ...]
    node: int
    address: str
    port: int
    lost: float = 15.0
    patience: float = 600.0


def parse_hostfile(text: str, source: str = "the hostfile") -> dict[str, int]:
    """Parse a hostfile; return host -> number of slots, in the file's order.

    Raises:
        ConfigError: if a line has another form, a host is listed twice or has no slots, or no host is listed.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise ConfigError(f"{source}, line {number}: {entry!r} is not a host with its slots: {_HOW}")
        host, slots = match["host"], int(match["slots"])
        check_host(host, f"{source}, line {number}")
        if host in hosts:
            raise ConfigError(f"{source}, line {number}: {host} is listed twice: give all its slots in one line")
        if not slots:
            raise ConfigError(f"{source}, line {number}: {host} has 0 slots: give at least 1, or remove the line")
        hosts[host] = slots
    if not hosts:
        raise ConfigError(f"{source} names no host: {_HOW}")
    return hosts


def check_host(host: str, source: str) -> None:
    """Check that a text is the name or address of a host. For ssh ``-oProxyCommand=...`` would be an option.

    Raises:
        ConfigError: it is not; the message begins with ``source``.
    """
    labels = host.rpartition("@")[2].removesuffix(".").split(".")
    if not _HOST.fullmatch(host) or not all(1 <= len(label) <= 63 for label in labels):
        raise ConfigError(
            f"{source}: {host!r} is not the name or address of a host: write letters, digits, '-', '.' and ':', and "
            "no '-' at the beginning, such as worker-1 or 10.0.0.1"
        )


def select(hosts: Mapping[str, int], include: str = "", exclude: str = "") -> Slots:
    """Return the slots to use, by host; hosts without any are left out.

    Args:
        hosts: host -> number of slots.
        include, exclude: as above; at most one of them.

    Raises:
        ConfigError: if both are given, or if one cannot be parsed, names an unknown host or slot, or leaves no slot.
    """
    if include and exclude:
        raise ConfigError("--include and --exclude are both given: give one of them")
    every = {host: tuple(range(count)) for host, count in hosts.items()}
    if include:
        chosen = _parse(include, every, "--include")
        return {host: chosen[host] for host in every if host in chosen}
    dropped = _parse(exclude, every, "--exclude") if exclude else {}
    left = {host: tuple(s for s in slots if s not in dropped.get(host, ())) for host, slots in every.items()}
    left = {host: slots for host, slots in left.items() if slots}
    if not left:
        raise ConfigError(f"--exclude {exclude!r} leaves no slot of {', '.join(every)}: exclude less")
    return left


def limit_slots(slots: Slots, nodes: int | None = None, per_node: int | None = None) -> Slots:
    """Return the first ``nodes`` hosts, and the first ``per_node`` slots of each.

    Raises:
        ConfigError: there are fewer hosts or slots.
    """
    if nodes is not None:
        if not 1 <= nodes <= len(slots):
            raise ConfigError(
                f"--num_nodes is {nodes}, but there are {len(slots)} hosts ({', '.join(slots)}): give a number from 1 "
                f"to {len(slots)}"
            )
        slots = dict(list(slots.items())[:nodes])
    if per_node is not None:
        for host, host_slots in slots.items():
            if not 1 <= per_node <= len(host_slots):
                raise ConfigError(
                    f"--num_gpus is {per_node}, but {host} has {len(host_slots)} slots: give a number from 1 to "
                    f"{len(host_slots)}, or change its slots in the hostfile"
                )
        slots = {host: numbers[:per_node] for host, numbers in slots.items()}
    return slots


def first_slots(slots: Slots, total: int) -> Slots:
    """Return the first ``total`` slots, over the hosts in order.

    Raises:
        ConfigError: there are fewer slots.
    """
    every = [(host, slot) for host, host_slots in slots.items() for slot in host_slots]
    if total > len(every):
        raise ConfigError(f"-np is {total}, but the hosts have {len(every)} slots: give at most that, or more slots")
    chosen = every[:total]
    return {host: tuple(s for h, s in chosen if h == host) for host in dict.fromkeys(host for host, _ in chosen)}


def listed(slots: tuple[int, ...]) -> str:
    """Return slots with commas between them."""
    return ",".join(map(str, slots))


def _parse(text: str, every: Slots, option: str) -> Slots:
    """Parse ``host1:0,2@host2``; return {host1: (0, 2), host2: all its slots}."""
    slots_of: Slots = {}
    for part in text.split("@"):
        # An IPv6 address contains colons. The slots follow the last colon, if a list of numbers follows it.
        host, colon, numbers = part.strip().rpartition(":")
        if not colon or part.strip() in every:
            host, numbers = part.strip(), ""
        if not host:
            raise ConfigError(f"{option} {text!r} has an empty part: write host1:0,2@host2")
        if host not in every:
            raise ConfigError(f"{option}: there is no host {host!r}; {nearest(host, every)}")
        if host in slots_of:
            raise ConfigError(f"{option}: {host} is listed twice: give its slots together, such as {host}:0,1")
        if not colon or (not numbers and host == part.strip()):
            slots_of[host] = every[host]
            continue
        slots = []
        for number in numbers.split(","):
            if not number.strip().isdecimal():
                raise ConfigError(
                    f"{option}: {number.strip()!r} is not a slot of {host}: write numbers, such as {host}:0,2"
                )
            slot = int(number)
            if slot not in every[host]:
                raise ConfigError(f"{option} names slot {slot}, but {host} has slots 0 to {len(every[host]) - 1}")
            if slot in slots:
                raise ConfigError(f"{option}: slot {slot} of {host} is listed twice: list it once")
            slots.append(slot)
        slots_of[host] = tuple(sorted(slots))
    return slots_of


def parse_nodes(text: str) -> tuple[int, int]:
    """Parse torchrun's ``--nnodes``, ``4`` or ``2:4``; return the least and the most number of hosts.

    Raises:
        ConfigError: it has another form.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if match is None:
        raise ConfigError(f"--nnodes {text!r}: write a number, such as 4, or the least and the most, such as 2:4")
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes {text!r}: give the smaller number first, and at least 1, such as 2:4")
    return least, most


def parse_ranks(text: str, option: str) -> set[int] | None:
    """Parse a list of ranks: ``0,3`` -> {0, 3}; ``all`` -> {-1}, which stands for all; ``none`` -> None.

    Raises:
        ConfigError: it has another form.
    """
    if text in ("all", "none"):
        return {-1} if text == "all" else None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"{option} {text!r}: write ranks, such as 0,3, or all, or none")
    return {int(part) for part in parts}
