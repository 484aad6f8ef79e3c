"""Start of ``triax run`` on every host of a hostfile, by ssh or another command.

It shows what the launchers print, and ends all when one fails. The user's command is a template with ``{host}`` and
``{command}``. Each host runs a launcher with its ``--node-rank``; the launchers agree by rendezvous.py. A launcher ends
when the pipe to its standard input closes, because this process has ended.
"""

from __future__ import annotations

import json
import os
import re
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

from ...base.errors import ConfigError
from .hosts import check_host
from .launch import STOP, Outcome

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=20 -- {host} {command}"
GRACE = 15.0  # seconds beyond the time limit in which launchers must end once one has ended
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # of a variable
_MARK = "\x1etriax "  # begins the line with a launcher's outcome
_HERE = ("localhost", "127.0.0.1", "::1")
_PASSED = ("NCCL_", "TORCH_", "OMP_", "MKL_", "UCX_", "PYTHONPATH")  # prefixes of variables for every host
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def outcome_line(outcome: Outcome) -> str:
    """Return an outcome as one line of text. A launcher prints it last, and ``run_on_hosts`` parses it."""
    return _MARK + json.dumps(asdict(outcome))


def exported_variables(
    environ: Mapping[str, str], asked: Sequence[str] = (), always: tuple[str, ...] = _PASSED
) -> dict[str, str]:
    """Return the environment variables for the ranks of every host.

    Args:
        environ: environment variables of this process.
        asked: the values of ``--export``, each ``NAME`` or ``NAME=VALUE``.
        always: prefixes of variables that are always exported.

    Raises:
        ConfigError: this process does not have a variable that is asked for, or it is not the name of a variable.
    """
    variables = {name: value for name, value in environ.items() if always and name.startswith(always)}
    for variable in asked:
        name, equals, value = variable.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--export {variable!r}: write letters, digits and _ as the name, such as MY_OPTION=1")
        if not equals and name not in environ:
            raise ConfigError(f"--export {name}: this process has no such variable; write --export {name}=VALUE")
        variables[name] = value if equals else environ[name]
    return variables


def template_of(launcher: str, arguments: Sequence[str]) -> str:
    """Return the command that starts a command on a host, with ``{host}`` and ``{command}`` in it.

    Raises:
        ConfigError: there are options of ssh for another launcher.
    """
    if launcher.lower() in ("ssh", "pdsh"):
        return SSH.replace("ssh ", " ".join(["ssh", *arguments, ""]), 1)
    if arguments:
        raise ConfigError(f"You gave --launcher {launcher!r} and options of ssh. Write them in the command.")
    return launcher


def host_command(
    template: str, host: str, words: Sequence[str], environment: Mapping[str, str], folder: str
) -> list[str]:
    """Return the local command line that runs ``words`` on a host, in a folder and with environment variables.

    Raises:
        ConfigError: the template lacks ``{host}`` or ``{command}``, or the host's name is malformed.
    """
    check_host(host, "the hosts")
    assigned = [f"{name}={value}" for name, value in sorted(environment.items())]
    command = f"cd {shlex.quote(folder)} && exec env {shlex.join([*assigned, *words])}"
    if template == SSH and is_local_host(host):
        return ["sh", "-c", command]
    parts = shlex.split(template)
    if "{command}" not in parts or not any("{host}" in part for part in parts):
        raise ConfigError(
            f"--launcher {template!r}: write ssh, or a command with {{host}} and, as a separate word, {{command}}: "
            "'ssh -p 2222 {host} {command}' or 'docker exec -i {host} sh -c {command}'"
        )
    return [command if part == "{command}" else part.replace("{host}", host) for part in parts]


def is_local_host(host: str) -> bool:
    """Return True if a host is this one, by its name or one of its addresses."""
    if host in (*_HERE, socket.gethostname()):
        return True
    try:
        address = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0))  # only an address of this host can be bound
        return True
    except (OSError, UnicodeError):  # UnicodeError: a part of the name is too long
        return False


class _Host:
    """Process that runs one host's launcher."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self._command = name, command
        self.outcome: Outcome | None = None
        self.last_errors: list[str] = []  # the last lines of its standard error
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
                self.last_errors = [*self.last_errors[-3:], text]
                print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def ended(self) -> int | None:
        """Return the launcher's exit code, once all its output was read. None while the launcher runs."""
        code = self.process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(2)
        return code

    def request_stop(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def final_outcome(self, code: int) -> Outcome:
        """Return the outcome that the launcher printed, or an outcome made from its exit code if it printed none."""
        if self.outcome is not None:
            return self.outcome
        last = f": {self.last_errors[-1]}" if self.last_errors else ""
        return Outcome(code if code > 0 else 1, f"{self.name}: the launcher ended with exit code {code}{last}")


def run_on_hosts(commands: Mapping[str, Sequence[str]], restarts: int, limit: float, grace: float) -> Outcome:
    """Run a command for each host; return the outcome of the first host that failed by itself.

    Args:
        commands: host -> the command line that starts its launcher.
        restarts: how often a launcher that ended without an outcome is restarted.
        limit: seconds in which the other launchers must end once one has failed.
        grace: seconds in which all must end once this process received a signal.
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
                    print(f"{host.final_outcome(code).line}: starting it again", file=sys.stderr, flush=True)
                    time.sleep(1.0)
                    host.start()
                    continue
                running.remove(host)
                if code != 0:
                    failed.append(host.final_outcome(code))
                    reported = host.outcome is not None
                    deadline = min(deadline, time.monotonic() + (limit + GRACE if reported else STOP + 1))
                    if not reported:  # the other launchers do not know of it
                        for other in running:
                            other.request_stop()
            if stopped:
                for host in running:
                    host.request_stop()
                deadline = min(deadline, time.monotonic() + grace + STOP)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for host in hosts:
            host.request_stop()
        end = time.monotonic() + STOP + 1
        while any(host.process.poll() is None for host in hosts) and time.monotonic() < end:
            time.sleep(0.05)
        for host in hosts:
            host.kill()
    if stopped:
        return Outcome(128 + stopped[0], f"stopped by {signal.Signals(stopped[0]).name}; all hosts have ended")
    causes = [outcome for outcome in failed if outcome.cause and outcome.line] or failed
    return causes[0] if causes else Outcome(0)
