"""Start ``triax run`` on every host of a hostfile, show what it prints, and end all when one fails.

Each host is reached by a command: ssh, or the user's own template with ``{host}`` and ``{command}`` in it. What runs
there is a launcher with its ``--node-rank``; the launchers agree among themselves (rendezvous.py). The pipe to a
launcher's standard input is how it learns that this process is gone.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO

from .config_base import ConfigError
from .launch import STOP, Outcome

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=20 {host} {command}"
GRACE = 15.0  # seconds beyond the time limit that launchers get to end, once one has
_MARK = "\x1etriax "  # begins the line by which a launcher says how it ended
_HERE = ("localhost", "127.0.0.1", "::1")
_PASSED = ("NCCL_", "TORCH_", "OMP_", "MKL_", "UCX_", "PYTHONPATH")  # variables that every host is given: beginnings
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def marked(outcome: Outcome) -> str:
    """A launcher's last line, for ``run_everywhere`` to read."""
    return _MARK + json.dumps(asdict(outcome))


def passed_on(
    environ: Mapping[str, str], asked: Sequence[str] = (), always: tuple[str, ...] = _PASSED
) -> dict[str, str]:
    """The variables that ranks on every host are given: those of the libraries, and ``NAME`` or ``NAME=VALUE``.

    Raises:
        ConfigError: a variable is asked for that this process does not have.
    """
    found = {name: value for name, value in environ.items() if always and name.startswith(always)}
    for each in asked:
        name, equals, value = each.partition("=")
        if not equals and name not in environ:
            raise ConfigError(f"--export {name}: this process has no such variable; write --export {name}=VALUE")
        found[name] = value if equals else environ[name]
    return found


def through(template: str, host: str, words: Sequence[str], environment: Mapping[str, str], folder: str) -> list[str]:
    """The command line, here, that runs ``words`` on a host, in a folder and with some variables.

    Raises:
        ConfigError: the template lacks one of its two places.
    """
    assigned = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    command = f"cd {shlex.quote(folder)} && exec env {' '.join([*assigned, shlex.join(words)])}"
    if template == SSH and is_here(host):
        return ["sh", "-c", command]
    parts = shlex.split(template)
    if "{command}" not in parts or not any("{host}" in part for part in parts):
        raise ConfigError(
            f"--launcher {template!r}: write ssh, or a command with {{host}} and, a word of its own, {{command}}, as "
            "'ssh -p 2222 {host} {command}' or 'docker exec -i {host} sh -c {command}'"
        )
    return [command if part == "{command}" else part.replace("{host}", host) for part in parts]


def is_here(host: str) -> bool:
    """Whether a host is this one, as far as its name or its addresses tell."""
    if host in (*_HERE, socket.gethostname()):
        return True
    try:
        address = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0))  # only an address of one's own can be bound
        return True
    except OSError:
        return False


class _Host:
    """One host's launcher, seen from here."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self._command = name, command
        self.outcome: Outcome | None = None
        self.said: list[str] = []  # its last lines of errors
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._show, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self._listen, args=(self.process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _show(self, pipe: IO[bytes]) -> None:
        while piece := os.read(pipe.fileno(), 65536):
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()

    def _listen(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            text = line.decode(errors="replace").rstrip("\n")
            if text.startswith(_MARK):
                self.outcome = Outcome(**json.loads(text.removeprefix(_MARK)))
            elif text.strip():
                self.said = [*self.said[-3:], text]
                print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def ended(self) -> int | None:
        """Its exit code, once all that it said was read."""
        code = self.process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(2)
        return code

    def tell_to_stop(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def story(self, code: int) -> Outcome:
        """What it said of its end; or, where it said nothing, what is known."""
        if self.outcome is not None:
            return self.outcome
        last = f": {self.said[-1]}" if self.said else ""
        return Outcome(code if code > 0 else 1, f"{self.name}: the launcher ended with exit code {code}{last}")


def run_everywhere(commands: Mapping[str, Sequence[str]], restarts: int, limit: float, grace: float) -> Outcome:
    """Run a command for each host; the outcome is that of the first one that failed by itself.

    Args:
        commands: host -> the command line that starts its launcher.
        restarts: how often a launcher that ended without a word, its host gone, is started again.
        limit: seconds that the others get to end, once one has failed.
        grace: and that all get, once this process was told to stop.
    """
    stopped: list[int] = []
    before = {number: signal.signal(number, lambda number, _: stopped.append(number)) for number in _SIGNALS}
    hosts = [_Host(name, command) for name, command in commands.items()]
    failed: list[Outcome] = []
    deadline = float("inf")
    try:
        running = list(hosts)
        while running and time.monotonic() < deadline:
            time.sleep(0.05)
            for host in list(running):
                code = host.ended()
                if code is None:
                    continue
                if code != 0 and host.outcome is None and host.starts <= restarts and not failed and not stopped:
                    print(f"{host.story(code).line}: starting it again", file=sys.stderr, flush=True)
                    time.sleep(1.0)
                    host.start()
                    continue
                running.remove(host)
                if code != 0:
                    failed.append(host.story(code))
                    told = host.outcome is not None
                    deadline = min(deadline, time.monotonic() + (limit + GRACE if told else STOP + 1))
                    if not told:  # the others have not heard of it
                        for other in running:
                            other.tell_to_stop()
            if stopped:
                for host in running:
                    host.tell_to_stop()
                deadline = min(deadline, time.monotonic() + grace + STOP)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for host in hosts:
            host.tell_to_stop()
        end = time.monotonic() + STOP + 1
        while any(host.process.poll() is None for host in hosts) and time.monotonic() < end:
            time.sleep(0.05)
        for host in hosts:
            host.kill()
    if stopped:
        return Outcome(128 + stopped[0], f"stopped by {signal.Signals(stopped[0]).name}; all hosts have ended")
    causes = [outcome for outcome in failed if outcome.cause and outcome.line] or failed
    return causes[0] if causes else Outcome(0)
