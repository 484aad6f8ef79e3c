"""Two hosts on this machine, as network namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path

_NEW_NETWORK = 0x40000000  # Linux's CLONE_NEWNET


def enter(host: str) -> None:
    """Move this thread, and those that it starts, to the network namespace of a host."""
    with Path("/var/run/netns", host).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"no namespace {host} can be entered")


class Namespaces:
    """Two hosts in network namespaces, with a cable between them that can be pulled."""

    template = "ip netns exec {host} sh -c {command}"

    def __init__(self) -> None:
        net = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
        self.hosts = (f"{net}.1", f"{net}.2")
        self._cable = f"v{os.getpid()}"
        for host in self.hosts:
            self.ip("netns", "add", host)
        a, b = self.hosts
        ends = {a: f"{self._cable}a", b: f"{self._cable}b"}
        self.ip("link", "add", ends[a], "netns", a, "type", "veth", "peer", "name", ends[b], "netns", b)
        for host in self.hosts:
            self.ip("-n", host, "addr", "add", f"{host}/24", "dev", ends[host])
            self.ip("-n", host, "link", "set", ends[host], "up")
            self.ip("-n", host, "link", "set", "lo", "up")

    @staticmethod
    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

    @classmethod
    def made(cls) -> Namespaces | None:
        """Return two hosts; None where namespaces cannot be made."""
        if os.geteuid() != 0 or not shutil.which("ip"):
            return None
        hosts = cls.__new__(cls)
        try:
            hosts.__init__()  # type: ignore[misc]
        except subprocess.CalledProcessError:
            hosts.close()
            return None
        return hosts

    def drop(self, host: int, packets: bool) -> None:
        """Drop what a host (0 or 1) sends to the other one, or no longer. What the other one sends arrives."""
        word, other = "add" if packets else "del", self.hosts[1 - host]
        self.ip("-n", self.hosts[host], "route", word, "blackhole", f"{other}/32")

    def down(self) -> None:
        self.ip("-n", self.hosts[1], "link", "set", f"{self._cable}b", "down")

    def up(self) -> None:
        self.ip("-n", self.hosts[1], "link", "set", f"{self._cable}b", "up")

    def close(self) -> None:
        for host in self.hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.ip("netns", "del", host)
