"""``triax run``: a script on the processes of one host or of many, by torchrun's options or DeepSpeed's."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from .config_base import ConfigError
from .hosts import Hosts, Slots, limit, nodes_range, parse_hostfile, ranks, select
from .launch import GRACE, cores, outcome_of, say, towards
from .remote import SSH, marked, passed_on, run_everywhere, through
from .timeline_file import recorded
from .worker import Module

PORT = 29500
CONTEXT = {"allow_interspersed_args": False, "allow_extra_args": True}  # what follows the script is its own
_PRELOAD = ("triax.engine.create", "triax.pipe", "triax.tensor_parallel")


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python file; with -m, a module. What follows are its arguments.")],
    module: Annotated[bool, typer.Option("-m", "--module", help="The script is a module, as for python -m.")] = False,
    nproc: Annotated[
        str | None,
        typer.Option(
            *("--nproc", "--nproc-per-node", "--nproc_per_node", "--num_gpus", "--num-gpus"),
            help="Processes a host: a number, gpu, cpu or auto. By default its slots in the hostfile, its GPUs, or 1.",
        ),
    ] = None,
    nnodes: Annotated[
        str,
        typer.Option("--nnodes", "--num_nodes", "--num-nodes", help="Hosts: a number; or MIN:MAX, that may change."),
    ] = "",
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", "-H", help="Lines of `host slots=N`: start on all of them from here.")
    ] = None,
    include: Annotated[str, typer.Option("--include", "-i", help="Of the hostfile's: host1:0,2@host2.")] = "",
    exclude: Annotated[str, typer.Option("--exclude", "-e", help="Of the hostfile's: host1:1@host2.")] = "",
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", "--node_rank", min=0, help="Of this host, where each is started by hand."),
    ] = None,
    master_addr: Annotated[
        str, typer.Option("--master-addr", "--master_addr", help="Of the first host; by default its name in the file.")
    ] = "",
    master_port: Annotated[
        int, typer.Option("--master-port", "--master_port", min=1, max=65535, help="On the first host.")
    ] = PORT,
    launcher: Annotated[
        str, typer.Option(help="How a host is reached: ssh, or a command with {host} and {command} in it.")
    ] = "ssh",
    export: Annotated[
        list[str] | None, typer.Option(help="A variable, NAME or NAME=VALUE, that ranks on every host are given.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", "--max_restarts", min=0, help="After a failure, start again so often.")
    ] = 0,
    log_dir: Annotated[
        str, typer.Option("--log-dir", "--log_dir", help="For rank-0.log, rank-1.log, ...; none: all print here.")
    ] = "runs/logs",
    tee: Annotated[str, typer.Option(help="Ranks whose output is shown here too: 0, or 0,3, or all, or none.")] = "0",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of each process; by default OMP_NUM_THREADS, or its share of the cores.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write what all ranks do into this file, for ui.perfetto.dev, crashes included.")
    ] = None,
    lost_after: Annotated[
        float, typer.Option(min=3.0, help="Seconds without a word after which a host counts as lost.")
    ] = 15.0,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds that ranks get after a SIGTERM, to save and leave.")
    ] = GRACE,
    wait: Annotated[float, typer.Option(min=1.0, help="Seconds to wait until all hosts are there.")] = 600.0,
    rdzv_backend: Annotated[str, typer.Option("--rdzv-backend", "--rdzv_backend", help="torchrun's, as c10d.")] = "",
    rdzv_endpoint: Annotated[
        str, typer.Option("--rdzv-endpoint", "--rdzv_endpoint", help="torchrun's, as host:29400.")
    ] = "",
    rdzv_id: Annotated[str, typer.Option("--rdzv-id", "--rdzv_id", help="torchrun's: the job's name.")] = "",
    rdzv_conf: Annotated[str, typer.Option("--rdzv-conf", "--rdzv_conf", help="torchrun's: key=value,...")] = "",
    standalone: Annotated[bool, typer.Option("--standalone", help="torchrun's: this host alone, the default.")] = False,
    driven: Annotated[str, typer.Option("--driven", hidden=True)] = "",
) -> None:
    """Run a script on many processes, here or on several hosts: torchrun, with the cause of a failure said last."""
    target: Path | Module = Module(script) if module else Path(script)
    if isinstance(target, Path) and not target.is_file():
        raise ConfigError(f"there is no file {script}: give a Python file, or -m and a module")
    least, most = nodes_range(nnodes) if nnodes else (1, 1)
    changing = least != most or (rdzv_backend or "static") != "static" or bool(rdzv_endpoint or rdzv_id or rdzv_conf)
    shown = ranks(tee, "--tee")
    extra = passed_on(os.environ, export or [], ())
    slots = _slots(hostfile, include, exclude, nnodes, nproc)
    if slots is not None and (changing or standalone):
        raise ConfigError(
            "--hostfile is a fixed list of hosts: leave out --standalone, --nnodes MIN:MAX and --rdzv-..."
        )
    if slots is not None and list(slots) == ["localhost"]:
        chosen = slots["localhost"]
        nproc, least = str(len(chosen)), 1
        if include or exclude:
            extra = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, chosen)), **extra}
        slots = None
    elif slots is not None and node_rank is None:
        address = master_addr or next(iter(slots))
        if len(slots) > 1 and not master_addr and address in ("localhost", "127.0.0.1"):
            raise ConfigError("the first host is localhost, which the others cannot reach: give its --master-addr")
        said = [
            *("--nnodes", str(len(slots)), "--master-addr", address, "--master-port", str(master_port)),
            *("--max-restarts", str(max_restarts), "--log-dir", log_dir, "--tee", tee),
            *("--lost-after", str(lost_after), "--wait", str(wait), "--driven", ",".join(slots)),
            *("--grace", str(grace)),
            *(("--threads", str(threads)) if threads else ()),
            *(("--timeline", str(timeline)) if timeline else ()),
        ]
        commands = {}
        for node, (host, chosen) in enumerate(slots.items()):
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, chosen))} if include or exclude else {}
            exports = [word for name, value in {**visible, **extra}.items() for word in ("--export", f"{name}={value}")]
            words = [sys.executable, "-m", "triax.engine.cli", "run", "--node-rank", str(node), "--nproc"]
            words += [str(len(chosen)), *said, *exports, *(["-m"] if module else []), script, *context.args]
            template = SSH if launcher == "ssh" else launcher
            commands[host] = through(template, host, words, passed_on(os.environ), os.getcwd())
        outcome = run_everywhere(commands, max_restarts, lost_after, grace)
        say(outcome)
        raise SystemExit(outcome.code)

    options: dict[str, Any] = {"restarts": max_restarts, "environment": extra, "grace": grace}
    if changing:
        options["rendezvous"] = _changing(least, most, rdzv_backend, rdzv_endpoint, rdzv_id, rdzv_conf, master_addr)
    elif least > 1:
        if node_rank is None or not master_addr:
            raise ConfigError(
                f"--nnodes {nnodes} needs --hostfile, which starts them all; or, started on each host by hand, "
                "--node-rank and --master-addr"
            )
        if node_rank >= least:
            raise ConfigError(f"--node-rank {node_rank} of {least} hosts: they count from 0 to {least - 1}")
        names = tuple(driven.split(",")) if driven else tuple(f"host {node}" for node in range(least))
        options["hosts"] = Hosts(names, node_rank, master_addr, master_port, lost_after, wait)
    logs = None if log_dir == "none" else Path(log_dir)
    if logs is not None:
        options |= {"logs": logs, "tee": shown or ()}
    if threads is None and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        threads = int(os.environ["OMP_NUM_THREADS"])
    if driven:
        _end_with_the_driver()
    with recorded(timeline, node_rank or 0) as variables:
        options["environment"] |= variables
        outcome = outcome_of(
            target, *context.args, ranks=_processes(nproc), threads=threads, preload=_PRELOAD, **options
        )
    if driven:
        print(marked(outcome), file=sys.stderr, flush=True)
    else:
        say(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(outcome.code)  # a call to a host that is gone may still be under way, and would be waited for


def _slots(hostfile: Path | None, include: str, exclude: str, nnodes: str, nproc: str | None) -> Slots | None:
    """Which slots of which hosts; None where no hosts are named."""
    if hostfile is None and not (include or exclude):
        return None
    if hostfile is None:
        hosts = {"localhost": _processes(nproc)}
        nproc = None
    else:
        try:
            text = hostfile.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the hostfile {hostfile} cannot be read: {error}") from error
        hosts = parse_hostfile(text, str(hostfile))
    slots = select(hosts, include, exclude)
    if nproc is not None and not nproc.isdecimal():
        raise ConfigError(
            f"--nproc {nproc}: the hostfile says how many slots a host has; give a number, or leave it out"
        )
    if ":" in nnodes:
        raise ConfigError(f"--nnodes {nnodes}: the hostfile is a fixed list of hosts; give a number, or leave it out")
    return limit(slots, nodes_range(nnodes)[0] if nnodes else None, int(nproc) if nproc else None)


def _processes(nproc: str | None) -> int:
    """How many on this host."""
    if nproc is not None and nproc.isdecimal() and int(nproc) > 0:
        return int(nproc)
    if nproc == "cpu":
        return cores()
    if nproc not in (None, "gpu", "auto"):
        raise ConfigError(f"--nproc {nproc!r}: write a number of at least 1, or gpu, cpu or auto")
    from ..grid.grid import gpus

    found = gpus()
    if nproc == "gpu" and not found:
        raise ConfigError("--nproc gpu, and this host has none: give a number, or cpu")
    return found or (cores() if nproc == "auto" else 1)


def _changing(
    least: int, most: int, backend: str, endpoint: str, name: str, settings: str, address: str
) -> dict[str, Any]:
    """The arguments of torch's rendezvous, under which hosts come and go."""
    endpoint = endpoint or address
    if not endpoint:
        raise ConfigError("--rdzv-endpoint is missing: give host:port, where the hosts meet, the same on each of them")
    given = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--rdzv-conf {setting!r}: write key=value,key=value")
        given[key.strip()] = value.strip()
    return {
        "backend": backend or "c10d",
        "endpoint": endpoint,
        "run_id": name or "triax",
        "min_nodes": least,
        "max_nodes": most,
        "local_addr": towards(endpoint.rpartition(":")[0] or endpoint),
        **given,
    }


def _end_with_the_driver() -> None:
    """The process that started this launcher holds the other end of its standard input: its end is theirs."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="watches the driver").start()
