"""``triax run``: start a script on the processes of one host or many."""

from __future__ import annotations

import atexit
import logging
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ..base.errors import ConfigError
from ..base.files import read_text
from ..base.ports import LOOPBACK, listen
from ..engine.monitor.trace.merge import recorded
from ..grid.environment import given_threads, run_secret
from ..grid.launcher.hosts import (
    Hosts,
    Slots,
    check_host,
    first_slots,
    limit_slots,
    parse_hostfile,
    parse_nodes,
    parse_ranks,
    select,
)
from ..grid.launcher.launch import GRACE, cores, outcome_of, own_address, print_outcome
from ..grid.launcher.remote import SSH, exported_variables, host_command, outcome_line, run_on_hosts
from ..grid.launcher.replicas import run_replicas, start_coordinator
from ..grid.launcher.worker import LOCAL_RANK, Executable, Module
from ..options.fault_tolerance import is_replica_name

PORT = 29500
# The script's own options follow it. --node_rank, as in torchrun and DeepSpeed, is --node-rank.
CONTEXT = {
    "allow_interspersed_args": False,
    "allow_extra_args": True,
    "token_normalize_func": lambda option: option.replace("_", "-"),
}
_HOST_LIST = re.compile(r"[^,\s]+:\d+(,[^,\s]+:\d+)*")
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_LOCAL_RANK = re.compile(r"""add_argument\(\s*["'](--local[_-]rank)["']""")
_PRELOAD = ("triax.compat.deepspeed.from_config", "triax.pipe", "triax.tensor_parallel")


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python file to run; with -m, a module. Its own arguments follow.")],
    module: Annotated[bool, typer.Option("-m", "--module", help="Run the script as a module, as python -m.")] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", help="Run the script as a program, without Python.")
    ] = False,
    nproc: Annotated[
        str | None,
        typer.Option(
            help="Processes per host: a number, gpu, cpu or auto. Default: the slots in the hostfile, the GPUs, or 1."
        ),
    ] = None,
    np: Annotated[int | None, typer.Option("-np", min=1, help="Processes on all hosts together.")] = None,
    nnodes: Annotated[str, typer.Option(help="Number of hosts; MIN:MAX lets hosts join and leave.")] = "",
    hostfile: Annotated[
        str,
        typer.Option(help="Start on all hosts of this file, `host slots=N` per line, or this list: host1:2,host2:2."),
    ] = "",
    include: Annotated[str, typer.Option(help="Only these slots: host1:0,2@host2.")] = "",
    exclude: Annotated[str, typer.Option(help="All but these slots: host1:1@host2.")] = "",
    node_rank: Annotated[int | None, typer.Option(min=0, help="Rank of this host, if you start each by hand.")] = None,
    master_addr: Annotated[
        str, typer.Option(help="Address of the first host. Default: its name in the hostfile.")
    ] = "",
    master_port: Annotated[int, typer.Option(min=1, max=65535, help="Port on the first host.")] = PORT,
    launcher: Annotated[
        str, typer.Option(help="How to start commands on hosts: ssh, or a command with {host} and {command} in it.")
    ] = "ssh",
    launcher_args: Annotated[
        list[str] | None, typer.Option(help="Further options of ssh, in quotes. Repeatable.")
    ] = None,
    no_local_rank: Annotated[
        bool, typer.Option("--no-local-rank", help="Do not pass --local_rank=N to a script that has this option.")
    ] = False,
    export: Annotated[
        list[str] | None, typer.Option(help="Environment variable for all ranks, NAME or NAME=VALUE. Repeatable.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Number of restarts after failures.")] = 0,
    log_dir: Annotated[str, typer.Option(help="Folder for rank-0.log, ...; none: print all here.")] = "runs/logs",
    tee: Annotated[
        str, typer.Option(help="Ranks whose output is also printed here: 0, or 0,3, or all, or none.")
    ] = "0",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per process. Default: OMP_NUM_THREADS, or a share of the cores.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write a trace of all ranks to this file, for ui.perfetto.dev. Survives crashes."),
    ] = None,
    lost_after: Annotated[float, typer.Option(min=3.0, help="Seconds of silence after which a host is lost.")] = 15.0,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds for ranks to save and exit after SIGTERM.")] = GRACE,
    replicas: Annotated[
        str,
        typer.Option(
            help="Replicas of fault_tolerance on this host, of --nproc processes each: a number, or names a,b. If one "
            "dies, it is started again, up to --max-restarts times, while the others train."
        ),
    ] = "",
    coordinator: Annotated[
        str,
        typer.Option(help="With --replicas: coordinator of several hosts, HOST:PORT. Default: one is started here."),
    ] = "",
    least: Annotated[
        int, typer.Option(min=1, help="With --replicas: smallest number of replicas with which steps are taken.")
    ] = 1,
    silence: Annotated[
        float,
        typer.Option(
            min=0.1, help="With --replicas: seconds without a heartbeat after which a replica counts as lost."
        ),
    ] = 2.0,
    patience: Annotated[
        float,
        typer.Option(min=0.1, help="With --replicas: seconds to wait for a late replica that still sends heartbeats."),
    ] = 60.0,
    wait: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for all hosts at the start.")] = 600.0,
    rdzv_endpoint: Annotated[str, typer.Option(help="Rendezvous address, as in torchrun: host:29400.")] = "",
    rdzv_conf: Annotated[
        list[str] | None, typer.Option(help="Rendezvous settings, as in torchrun: key=value,... Repeatable.")
    ] = None,
    dry: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="RANKS",
            help="Start no ranks: divide so many ranks into classes, run one rank of each class here for one step, "
            "without values, and report memory, traffic, and what would fail.",
        ),
    ] = None,
    dry_value: Annotated[
        float, typer.Option(help="With --dry: the number to use for values that are not computed, such as a loss.")
    ] = 1.0,
    driven: Annotated[str, typer.Option("--driven", hidden=True)] = "",
) -> None:
    """Run a script on many processes, on this host or on several, and report the cause of a failure last."""
    arguments = context.args
    if not no_python:
        script, module, arguments = _program(script, module, arguments)
    target: Path | Module | Executable = Executable(script) if no_python else Module(script) if module else Path(script)
    if isinstance(target, Path) and not target.is_file():
        raise ConfigError(f"There is no file {script}. Give a Python file, or -m and the name of a module.")
    if isinstance(target, Path) and not no_local_rank:
        arguments = [*_local_rank(target), *arguments]
    if dry is not None:
        _dry_run(target, arguments, dry, dry_value, nproc)
    if replicas:
        if nnodes or hostfile or node_rank is not None or rdzv_endpoint or np is not None or timeline:
            raise ConfigError(
                "--replicas starts jobs only on this host: give --nproc, and start the other hosts' replicas there, "
                "with other names and --coordinator HOST:PORT"
            )
        _say_idle(context, "master_port", "master_addr")
        options = [*(("--nproc", nproc) if nproc else ()), *(("--threads", str(threads)) if threads else ())]
        options += ["--tee", tee, "--grace", str(grace), "--no-local-rank"]
        options += [word for each in export or [] for word in ("--export", each)]
        program = [*(["--no-python"] if no_python else []), *(["-m"] if module else []), script, *arguments]
        _run_replicas(replicas, options, program, coordinator, (least, silence, patience), max_restarts, log_dir, grace)
    least_hosts, most = parse_nodes(nnodes) if nnodes else (1, 1)
    rendezvous = _settings(rdzv_conf or [])
    elastic = least_hosts != most or bool(rdzv_endpoint or rendezvous)
    if master_addr:
        check_host(master_addr, "--master-addr")
    shown = parse_ranks(tee, "--tee")
    extra = exported_variables(os.environ, export or [], ())
    slots = _slots(hostfile, include, exclude, nnodes, nproc, np)
    if np is not None and slots is None:
        nproc = str(np)
    if slots is not None and node_rank is not None and list(slots) != ["localhost"]:
        node = _node_rank(node_rank, len(slots), str(len(slots)), _first_address(slots, master_addr))
        master_addr, least_hosts, most = _first_address(slots, master_addr), len(slots), len(slots)
        nnodes, nproc, slots = str(len(slots)), str(len(list(slots.values())[node])), None
    if slots is not None and elastic:
        raise ConfigError("--hostfile is a fixed list of hosts. Leave out --nnodes MIN:MAX and --rdzv-...")
    if slots is not None and list(slots) == ["localhost"]:
        chosen = slots["localhost"]
        nproc, least_hosts, slots = str(len(chosen)), 1, None
        if include or exclude:
            extra = {"CUDA_VISIBLE_DEVICES": _listed(chosen), **extra}
    if slots is not None and node_rank is None:
        address = _first_address(slots, master_addr)
        options = [
            *("--nnodes", str(len(slots)), "--master-addr", address, "--master-port", str(master_port)),
            *("--max-restarts", str(max_restarts), "--log-dir", log_dir, "--tee", tee),
            *("--lost-after", str(lost_after), "--wait", str(wait), "--driven", ",".join(slots)),
            *("--grace", str(grace)),
            *(("--threads", str(threads)) if threads else ()),
            *(("--timeline", str(timeline)) if timeline else ()),
        ]
        options += [*(["--no-python"] if no_python else []), "--no-local-rank"]  # the arguments have it already
        program = [*(["-m"] if module else []), script, *arguments]
        template = _template(launcher, launcher_args or [])
        commands = _host_commands(slots, options, program, extra, template, select_gpus=bool(include or exclude))
        outcome = run_on_hosts(commands, max_restarts, lost_after, grace)
        print_outcome(outcome)
        raise SystemExit(outcome.code)

    if least_hosts == 1 and not elastic and not driven:
        _say_idle(context, "master_port", "master_addr")
    settings: dict[str, Any] = {"restarts": max_restarts, "environment": extra, "grace": grace}
    if elastic:
        settings["rendezvous"] = _rendezvous(least_hosts, most, rdzv_endpoint or master_addr, rendezvous)
    elif least_hosts > 1:
        node = _node_rank(node_rank, least_hosts, nnodes, master_addr)
        names = tuple(driven.split(",")) if driven else tuple(f"host {each}" for each in range(least_hosts))
        settings["hosts"] = Hosts(names, node, master_addr, master_port, lost_after, wait)
    if log_dir != "none":
        settings |= {"logs": Path(log_dir), "tee": shown or ()}
    settings["threads"] = _threads(threads)
    if driven:
        _stop_with_driver()
    with recorded(timeline, node_rank or 0) as variables:
        settings["environment"] |= variables
        outcome = outcome_of(target, *arguments, ranks=_processes(nproc), preload=_PRELOAD, **settings)
    if driven:
        print(outcome_line(outcome), file=sys.stderr, flush=True)
    else:
        print_outcome(outcome)
    _exit(outcome.code)


def _say_idle(context: typer.Context, *names: str) -> None:
    """Log which of these options the user gave, though all ranks are on this host."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            text = "triax run: --%s does nothing: on one host, ranks meet on 127.0.0.1 at a free port"
            logging.getLogger("triax").warning(text, name.replace("_", "-"))


def _run_replicas(
    replicas: str,
    options: list[str],
    program: list[str],
    coordinator: str,
    limits: tuple[int, float, float],
    restarts: int,
    log_dir: str,
    grace: float,
) -> NoReturn:
    """Run replicas as jobs of their own on this host, and exit.

    Args:
        replicas: their number, or their names.
        options: options of each replica's ``triax run``.
        program: the script and its arguments.
        coordinator: address of the coordinator; empty: it is started here.
        limits: its ``--least``, ``--silence`` and ``--patience``.
        restarts, log_dir, grace: the options of these names.
    """
    names = [str(each) for each in range(int(replicas))] if replicas.isdecimal() else replicas.split(",")
    if not names or len(set(names)) < len(names) or not all(map(is_replica_name, names)):
        raise ConfigError(f"--replicas is {replicas!r}: give a number of at least 1, or different names: a,b,c")
    logs = Path("runs/logs" if log_dir == "none" else log_dir)
    serve = None
    if not coordinator:
        secret = os.environ.get("TRIAX_SECRET") or secrets.token_hex(16)
        with listen(LOOPBACK) as probe:
            port = int(probe.getsockname()[1])
        coordinator = f"{LOOPBACK}:{port}"
        serve = partial(start_coordinator, port, *limits, secret, logs / "coordinator.log")
    else:
        secret = run_secret().decode()

    def command(name: str) -> list[str]:
        folder = "none" if log_dir == "none" else str(logs / f"replica-{name}")
        return [sys.executable, "-m", "triax.cli.main", "run", *options, "--log-dir", folder, *program]

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    raise SystemExit(run_replicas(command, names, coordinator, restarts, logs, grace, say, serve, secret))


def _dry_run(
    target: Path | Module | Executable, arguments: list[str], ranks: int, stand_in: float, nproc: str | None
) -> NoReturn:
    """Run a script as ranks of a cluster without the cluster, print what was found, and exit: 1 if it would fail."""
    if isinstance(target, Executable):
        raise ConfigError("--dry runs only Python, because it replaces torch's functions. Leave out --no-python.")
    from ..plugins.dry_run.dry_run import dry_run  # imported only where it is used: it needs torch
    from ..plugins.dry_run.rank import Script, Settings
    from ..plugins.dry_run.report import report

    per_host = int(nproc) if nproc is not None and nproc.isdecimal() else Settings._field_defaults["per_host"]
    module = isinstance(target, Module)
    program = Script(target.name if isinstance(target, Module) else str(target), arguments, module)
    found = dry_run(program.run, Settings(ranks, per_host, stand_in=stand_in), partial(typer.echo, err=True))
    print(report(found), flush=True)
    raise SystemExit(1 if found.problems else 0)


def _program(script: str, module: bool, arguments: list[str]) -> tuple[str, bool, list[str]]:
    """Return the script or module and its arguments. ``python`` before them is left out, as horovodrun takes it.

    Raises:
        ConfigError: ``python`` has options of its own, or no script.
    """
    if not _PYTHON.fullmatch(Path(script).name) or not arguments:
        return script, module, arguments
    first, *rest = arguments
    if first == "-m" and rest:
        return rest[0], True, rest[1:]
    if first.startswith("-"):
        raise ConfigError(f"You wrote {script} {first}, but options of Python have no effect here. Leave {first} out.")
    return first, module, rest


def _local_rank(script: Path) -> list[str]:
    """Return the option with which ``deepspeed`` tells a script its rank on the host, if the script has this option."""
    found = _LOCAL_RANK.search(read_text(script, "replace"))
    return [] if found is None else [f"{found[1]}={LOCAL_RANK}"]


def _template(launcher: str, arguments: list[str]) -> str:
    """Return the command that starts a command on a host, with ``{host}`` and ``{command}`` in it.

    Raises:
        ConfigError: the launcher starts ranks itself, or its options are not known.
    """
    from ..compat.launcher_options import STARTERS

    if launcher.lower() in STARTERS:
        raise ConfigError(f"triax run --launcher {launcher}: {STARTERS[launcher.lower()]}.")
    if launcher.lower() not in ("ssh", "pdsh"):
        if arguments:
            raise ConfigError(f"You gave --launcher {launcher!r} and options of ssh. Write them in the command.")
        return launcher
    return SSH.replace("ssh ", " ".join(["ssh", *arguments, ""]), 1)


def _first_address(slots: Slots, master_addr: str) -> str:
    """Return the address of the first host, which every other host connects to."""
    address = master_addr or next(iter(slots))
    if len(slots) > 1 and not master_addr and address in ("localhost", "127.0.0.1"):
        raise ConfigError("The first host is localhost, which the others cannot reach. Give --master-addr.")
    return address


def _host_commands(
    slots: Slots, options: list[str], program: list[str], extra: dict[str, str], launcher: str, select_gpus: bool
) -> dict[str, list[str]]:
    """Return for each host the command that starts ``triax run`` there, through ssh or another launcher.

    Args:
        slots: the slots of each host.
        options: options of ``triax run``, equal on every host.
        program: the script and its arguments.
        extra: environment variables of the ranks.
        launcher: a command with ``{host}`` and ``{command}`` in it.
        select_gpus: True if the slots are indices of GPUs, False if only the number of slots counts.
    """
    commands = {}
    for node, (host, chosen) in enumerate(slots.items()):
        variables = {**({"CUDA_VISIBLE_DEVICES": _listed(chosen)} if select_gpus else {}), **extra}
        exports = [word for name, value in variables.items() for word in ("--export", f"{name}={value}")]
        words = [sys.executable, "-m", "triax.cli.main", "run", "--node-rank", str(node), "--nproc"]
        words += [str(len(chosen)), *options, *exports, *program]
        commands[host] = host_command(launcher, host, words, exported_variables(os.environ), os.getcwd())
    return commands


def _node_rank(node_rank: int | None, hosts: int, nnodes: str, master_addr: str) -> int:
    """Return the rank of this host, if the user starts ``triax run`` on each host by hand.

    Raises:
        ConfigError: the rank or the first host's address is missing, or the rank is too large.
    """
    if node_rank is None or not master_addr:
        raise ConfigError(
            f"--nnodes {nnodes} needs --hostfile, to start all hosts from here. To start each host by hand, give "
            "--node-rank and --master-addr on each."
        )
    if node_rank >= hosts:
        raise ConfigError(f"You gave --node-rank {node_rank}, but {hosts} hosts count from 0 to {hosts - 1}.")
    return node_rank


def _threads(given: int | None) -> int | None:
    """Return the number of threads per process: the given number, or else ``OMP_NUM_THREADS``.

    None means that each process gets an equal share of the host's cores.
    """
    return given_threads() if given is None else given


def _exit(code: int) -> NoReturn:
    """End this process at once, because a normal exit would wait for unfinished calls to a host without an answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _slots(hosts: str, include: str, exclude: str, nnodes: str, nproc: str | None, total: int | None) -> Slots | None:
    """Return the slots to use on each host, host -> indices of slots. None if the options name no hosts.

    Args:
        hosts: path of a hostfile, or a list as horovodrun takes it, ``host1:2,host2:2``.
        include, exclude, nnodes, nproc: the options.
        total: ``-np``, the slots to use on all hosts, the first ones.
    """
    if not hosts and not (include or exclude):
        return None
    if not hosts:
        found = {"localhost": _processes(nproc if total is None else str(total))}
        nproc = total = None
    elif Path(hosts).exists() or not _HOST_LIST.fullmatch(hosts):
        try:
            text = read_text(hosts)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The hostfile {hosts} cannot be read because of this error: {error}") from error
        found = parse_hostfile(text, hosts)
    else:
        lines = [each.rpartition(":") for each in hosts.split(",")]
        found = parse_hostfile("\n".join(f"{host} slots={count}" for host, _, count in lines), f"-H {hosts}")
    slots = select(found, include, exclude)
    if nproc is not None and not nproc.isdecimal():
        raise ConfigError(
            f"You gave --nproc {nproc}, but the hostfile has the slots of each host. Give a number, or leave it out."
        )
    if ":" in nnodes:
        raise ConfigError(f"--nnodes is {nnodes}, but the hostfile is a fixed list. Give a number, or leave it out.")
    slots = limit_slots(slots, parse_nodes(nnodes)[0] if nnodes else None, int(nproc) if nproc else None)
    return slots if total is None else first_slots(slots, total)


def _processes(nproc: str | None) -> int:
    """Return the number of processes on this host."""
    if nproc is not None and nproc.isdecimal() and int(nproc) > 0:
        return int(nproc)
    if nproc == "cpu":
        return cores()
    if nproc not in (None, "gpu", "auto"):
        raise ConfigError(f"--nproc is {nproc!r}, but it must be a number of at least 1, or gpu, cpu or auto.")
    from ..grid.devices import accelerators

    found = accelerators()
    if nproc == "gpu" and not found:
        raise ConfigError("You gave --nproc gpu, but this host has no GPU. Give a number, or cpu.")
    return found or (cores() if nproc == "auto" else 1)


def _settings(conf: list[str]) -> dict[str, str]:
    """Return the settings of ``--rdzv-conf``, of which ``backend=static`` alone means no rendezvous, as in torchrun."""
    found = {}
    for setting in filter(None, ",".join(conf).split(",")):
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--rdzv-conf has {setting!r}, which has no value. Write key=value,key=value.")
        found[key.strip()] = value.strip()
    return {} if found == {"backend": "static"} else found


def _rendezvous(least: int, most: int, endpoint: str, given: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of torch's rendezvous, through which hosts join and leave an elastic run."""
    if not endpoint:
        raise ConfigError("--rdzv-endpoint is missing. Give host:port, and the same one on every host.")
    host = endpoint.rpartition(":")[0] or endpoint
    if given.get("store_type", "tcp") == "tcp":  # otherwise the endpoint is a file
        check_host(host.removeprefix("[").removesuffix("]"), "--rdzv-endpoint")
    return {
        "backend": "c10d",
        "endpoint": endpoint,
        "run_id": "triax",
        "min_nodes": least,
        "max_nodes": most,
        "local_addr": own_address(host),
        **given,
    }


def _stop_with_driver() -> None:
    """Send SIGTERM to this launcher when its standard input closes: the process that started it has ended."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="triax watches the driver").start()
