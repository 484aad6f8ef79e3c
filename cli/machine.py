"""``triax machine``: a machine's figures for ``triax plan``, timed here or fitted to a table of measured runs."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import ConfigError, no_such
from ..base.files import check_output
from ..base.tables import table, terminal
from ..options.base import Options, option
from .flags import one_line_errors, with_flags
from .foreign_options import Command
from .verbs import group

# All else is imported where it is used: `triax --help` needs none of it.
if TYPE_CHECKING:
    from ..models.config import TransformerConfig
    from ..plugins.plan.fit import MeasuredRun

machine = group("machine")

NEEDED = ("model", "layout", "batch", "step_s")
COLUMNS = (*NEEDED, "name", "fields", "sequence", "precision", "products", "memory_gib", "switches")


@dataclass(frozen=True, kw_only=True)
class FitFlags(Options):
    """Flags of ``triax machine fit``."""

    machine: str = option("h100-80g", "The description to start from: a100-80g, h100-80g, h200, b200, or a file.")
    output: Path | None = option(
        None, "Write the machine file (.json) with the fitted efficiencies.", writes=(".json",)
    )
    json: bool = option(False, "Print one JSON object.")


@machine.command(cls=Command)
@with_flags
@one_line_errors
def measure(file: Annotated[Path, typer.Argument(help="File to write (.json), for --machine.")]) -> None:
    """Time this machine for a minute, and write its description."""
    check_output(file, (".json",))
    from ..plugins.plan.measure_machine import measure as timed  # imports torch

    profile = timed(file.stem, say=lambda line: typer.echo(line, err=True))
    file.write_text(json.dumps(profile.to_dict(), indent=1) + "\n", encoding="utf-8")
    typer.echo(f"{file}: {profile.sources['measured']}")


@machine.command(cls=Command)
@with_flags
@one_line_errors
def fit(
    path: Annotated[Path, typer.Argument(help="Measured runs (.csv), a line for each.", metavar="ROWS")],
    flags: FitFlags,
) -> None:
    """Fit the efficiencies of a machine to measured runs, and print each run's leave-one-out error."""
    from ..plugins.plan.fit import figures, fitted
    from ..plugins.plan.machine import machine as machine_of

    output = flags.output
    start, runs = machine_of(flags.machine), read_runs(path)
    result, errors = fitted(start, runs, path.name)
    if output is not None:
        result = replace(result, name=output.stem)
        output.write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    rows: list[dict[str, Any]] = []
    for run, error in zip(runs, errors, strict=True):
        rows.append({"name": run.name, "measured_s": run.seconds, "fitted_s": run.predicted(result), "left_out": error})
        if run.memory is not None:
            rows[-1]["memory_error"] = run.predicted_memory(result) / run.memory - 1
    if flags.json:
        values = {"from": figures(start), "figures": figures(result), "error": result.fitted_error, "rows": rows}
        typer.echo(json.dumps({**values, "written": None if output is None else str(output)}))
        return
    heads = ("run", "measured, s", "fitted, s", "error", "error left out", "memory error")
    shown = [
        (
            *(row["name"], f"{row['measured_s']:.4g}", f"{row['fitted_s']:.4g}"),
            *(f"{row['fitted_s'] / row['measured_s'] - 1:+.1%}", f"{row['left_out']:+.1%}"),
            f"{row['memory_error']:+.1%}" if "memory_error" in row else "",
        )
        for row in rows
    ]
    console = terminal()
    console.print(table(heads, shown, f"{len(runs)} runs of {path.name} on {start.name}"))
    before, after = figures(start), figures(result)
    for name, value in after.items():
        console.print(f"{name}: {value:.3g} (before: {before[name]:.3g})")
    sizes = [abs(error) for error in errors]
    console.print(f"left out one by one: {sum(sizes) / len(sizes):.1%} on average, {max(sizes):.1%} at worst")
    if output is None:
        console.print("Give --output mine.json for a machine file with these figures.")
    else:
        console.print(f"wrote {output}: a machine file, for triax plan --machine {output}", soft_wrap=True)


def read_runs(path: Path) -> list[MeasuredRun]:
    """Read the runs of a CSV file; lines that begin with # are comments.

    Raises:
        ValueError: a column or a value is missing, unknown or wrong; the message has the line's number.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    except OSError as error:
        raise ValueError(f"the file of rows {path} cannot be read: {error.strerror}.") from None
    rows = list(csv.DictReader(lines, skipinitialspace=True))
    if not rows:
        raise ValueError(f"{path} has no rows. Give a first line with {', '.join(NEEDED)}, and a line for each run.")
    for column in rows[0]:
        if column not in COLUMNS:
            raise ValueError(no_such(f"{path}: column", str(column), COLUMNS))
    if missing := [column for column in NEEDED if column not in rows[0]]:
        raise ValueError(f"{path} has no column {missing[0]}. Give at least {', '.join(NEEDED)}.")
    models: dict[tuple[str, str], TransformerConfig] = {}
    runs = []
    for number, row in enumerate(rows, 1):
        try:
            runs.append(_run({key: (value or "").strip() for key, value in row.items() if key}, path, number, models))
        except (ConfigError, ValueError, TypeError) as error:
            raise ValueError(f"{path}, row {number}: {error}") from error
    return runs


def _run(
    row: Mapping[str, str], path: Path, number: int, models: dict[tuple[str, str], TransformerConfig]
) -> MeasuredRun:
    """Return the run of a row."""
    from ..plugins.plan.fit import MeasuredRun
    from ..plugins.plan.machine import SWITCHES
    from ..plugins.plan.parallel_layout import ParallelLayout
    from .plan_inputs import model_of, parse_layout

    key = row["model"], row.get("fields", "")
    if key not in models:
        beside = path.parent / row["model"]
        config, _, _ = model_of(str(beside) if beside.suffix and beside.is_file() else row["model"])
        models[key] = replace(config, **_pairs(key[1], None)) if key[1] else config
    config = models[key]
    layout = ParallelLayout(**{name: values[0] for name, values in parse_layout(row["layout"]).items()})
    memory = row.get("memory_gib")
    run = MeasuredRun(
        row.get("name") or f"row {number}",
        config,
        (layout,),
        int(row["batch"]),
        int(row.get("sequence") or config.max_position_embeddings),
        float(row["step_s"]),
        row.get("precision") or "bf16",
        row.get("products") or None,
        float(memory) * 2**30 if memory else None,
        _pairs(row.get("switches", ""), SWITCHES),
    )
    if not run.seconds > 0:
        raise ValueError(f"step_s is {row['step_s']}. Give seconds.")
    layout.microbatches(run.batch)
    return run


def _pairs(text: str, known: tuple[str, ...] | None) -> dict[str, Any]:
    """Return the values of ``name=value,...``: true, false or numbers.

    Raises:
        ValueError: a name is not one of the known ones, or a value cannot be read.
    """
    values: dict[str, Any] = {}
    for pair in filter(None, (word.strip() for word in text.split(","))):
        name, _, value = pair.partition("=")
        if known is not None and name not in known:
            raise ValueError(no_such("switches", name, known))
        if value not in ("true", "false") and (known is not None or not value.isdecimal()):
            raise ValueError(f"{name} is {value!r}. Give true or false{'' if known else ', or a whole number'}.")
        values[name] = int(value) if value.isdecimal() else value == "true"
    return values
