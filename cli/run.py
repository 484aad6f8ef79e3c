"""``triax run``: start a script on the processes of one host or many."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ..base.errors import ConfigError
from ..options.base import Options, option
from ..options.launch import LaunchOptions, ReplicaOptions
from ..options.words import flag
from .dry_report import dry_run
from .flags import with_flags

# All else is imported where it is used: `triax --help` needs none of it.
if TYPE_CHECKING:
    from ..grid.launcher.program import LaunchedProgram


@dataclass(frozen=True, kw_only=True)
class DryFlags(Options):
    """Flags of a dry run."""

    dry_run: int | None = option(
        None,
        "Start no ranks: divide so many ranks into classes, run one rank of each class here for one step, without "
        "values, and report memory, traffic, and what would fail.",
        least=1,
    )
    dry_value: float = option(
        1.0, "With --dry-run: the number to use for values that are not computed, such as a loss.", needs="dry_run"
    )


@with_flags
def run(
    called: typer.Context,
    script: Annotated[str, typer.Argument(help="Python file to run; with -m, a module. Its own arguments follow.")],
    options: LaunchOptions,
    replicas: ReplicaOptions,
    dry: DryFlags,
    driven: Annotated[str, typer.Option("--driven", hidden=True)] = "",
) -> None:
    """Run a script on many processes, on this host or on several, and report the cause of a failure last."""
    from ..compat.launcher_options import STARTERS
    from ..engine.monitor.trace.merge_timelines import recorded
    from ..grid.launcher.launch import print_outcome
    from ..grid.launcher.placement import is_elastic, number_of_hosts, placed
    from ..grid.launcher.program import program_of
    from ..grid.launcher.remote import outcome_line
    from ..grid.launcher.run import run_as_replicas, run_driven, run_here

    program = program_of(script, called.args, options)
    if dry.dry_run is not None:
        _dry_run(program, dry, options.nproc)
    if replicas.replicas:
        _say_idle(options)
        raise SystemExit(run_as_replicas(options, replicas, program))
    if options.launcher.lower() in STARTERS:
        raise ConfigError(f"triax run --launcher {options.launcher}: {STARTERS[options.launcher.lower()]}.")
    options, slots = placed(options)
    if slots is not None:
        outcome = run_driven(options, program, slots)
        print_outcome(outcome)
        raise SystemExit(outcome.code)
    if number_of_hosts(options)[0] == 1 and not is_elastic(options) and not driven:
        _say_idle(options)
    with recorded(options.timeline, options.node_rank or 0) as variables:
        outcome = run_here(options, program, variables, tuple(filter(None, driven.split(","))))
    if driven:
        print(outcome_line(outcome), file=sys.stderr, flush=True)
    else:
        print_outcome(outcome)
    _exit(outcome.code)


def _say_idle(options: LaunchOptions) -> None:
    """Log which options for several hosts the user gave, though all ranks are on this host."""
    for name in ("master_port", "master_addr"):
        if name in options.given:
            text = "triax run: %s does nothing: on one host, ranks meet on 127.0.0.1 at a free port"
            logging.getLogger("triax").warning(text, flag(name))


def _dry_run(program: LaunchedProgram, flags: DryFlags, nproc: str | None) -> NoReturn:
    """Run a script as ranks of a cluster without the cluster, print what was found, and exit: 1 if it would fail."""
    from ..grid.launcher.worker import Executable, Module
    from ..plugins.dry_run.rank import Script

    target = program.target
    if isinstance(target, Executable):
        raise ConfigError("--dry-run runs only Python, because it replaces torch's functions. Leave out --no-python.")
    is_module = isinstance(target, Module)
    script = Script(target.name if isinstance(target, Module) else str(target), [*program.arguments], is_module)
    per_host: dict[str, Any] = {"per_host": int(nproc)} if nproc is not None and nproc.isdecimal() else {}
    dry_run(script.run, flags.dry_run or 0, stand_in=flags.dry_value, **per_host)


def _exit(code: int) -> NoReturn:
    """End this process at once, because a normal exit would wait for unfinished calls to a host without an answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)
