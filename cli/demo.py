"""``triax demo``: a small model trained on two pipeline stages here, and the measured timeline of its last step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError
from ..base.tables import terminal
from ..grid.environment import read_environment

_NO_STEP = 10**6  # of monitor.trace: a run that ends before this step traces its last one
_NEXT = {
    "triax generate {folder} --prompt 'def '": "text of the model",
    "triax report {folder} --serve": "its page, in a browser",
    "triax schedule compare --pipe 2": "other schedules of the same stages",
    "triax new my_model": "a project of your own",
    "triax recipe": "training files for real runs",
}


def demo(
    output: Annotated[Path, typer.Option(help="Folder of runs; the demo replaces the folder demo in it.")] = Path(
        "runs"
    ),
) -> None:
    """Train a small GPT on two stages for less than a minute, and draw the measured timeline of its last step.

    Two processes on this machine train on triax's own source; each byte is a token.
    """
    from ..data.tokenization import tokenize
    from ..engine.monitor.report.pictures import from_zero
    from ..engine.monitor.report.run_folder import read_run, read_trace
    from ..grid.launcher.launch import cores, launch
    from ..pipe.program.draw import text
    from ..train.loop import train
    from ..train.sections import TrainingFile
    from ..train.start import PRELOAD, make_job

    if read_environment() is not None:
        raise ConfigError("triax demo starts its own two processes: type it without a launcher.")
    folder, source = output / "demo", Path(__file__).resolve().parents[1]
    texts = sorted(str(path) for room in ("pipe", "engine", "zero") for path in (source / room).rglob("*.py"))
    tokens = tokenize(texts, "bytes", folder / "tokens", processes=min(2, cores()), split="paragraph").folder
    terminal().print(f"text    {tokens.index.tokens:,} bytes of triax's own source")
    values = {
        "name": "demo",
        "runs": str(output),
        "model": {"preset": "bytes-small"},
        "data": {"training": str(folder / "tokens"), "held_out": 0.05},
        "grid": {"pipe": 2},
        "schedule": "1f1b",
        "batch": {"size": 16, "microbatch": 2},
        "precision": "fp32",
        "training": {
            "steps": 100,
            "learning_rate": {"peak": 2e-3, "warmup_steps": 20},
            "time_limit": "20s",
        },
        "evaluate": {"sequences": 64},
        "checkpoint": False,
        "monitor": {"print_every": 10, "trace": _NO_STEP},
    }
    job = make_job(TrainingFile.of(values))
    code = launch(train, job, ranks=2, topology=job.topology, logs=job.folder, preload=PRELOAD)
    if code:
        raise typer.Exit(code)
    console = terminal()
    traced = read_trace(read_run(folder).trace or {})
    if traced is not None:
        times = from_zero(traced.timeline(), 1e3)
        console.print(f"\nStep {traced.step} as measured on two stages: rank 0 has the first half of the layers")
        console.print(text(times, min(console.width, 160) - 8, " ms"))
        idle = sum(times.idle) / len(times.idle)
        console.print(f"The step took {times.makespan:.0f} ms. The stages were idle for {idle:.1%} of it on average.")
        for rank, share in enumerate(times.idle):
            busy, waited = (1 - share) * times.makespan, share * times.makespan
            console.print(f"Rank {rank} computed for {busy:.0f} ms and waited for {waited:.0f} ms ({share:.1%}).")
    if (picture := folder / "schedule.png").is_file():
        console.print(f"The same as a picture: {picture}")
    console.print("\nNext:")
    console.print(*(f"  {command.format(folder=folder):44} # {what}" for command, what in _NEXT.items()), sep="\n")
