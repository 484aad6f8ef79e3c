"""``triax compat``: configurations in DeepSpeed's dialect, checked and resolved; their schema and table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import ConfigError
from .foreign_options import Command
from .output import echo
from .verbs import group

compat = group("compat")


@compat.callback()
def _group() -> None:
    """Keep the verb: a group of one command would be this command."""


@compat.command(cls=Command)
def config(
    file: Annotated[Path | None, typer.Argument(help="Configuration file, in DeepSpeed's JSON dialect.")] = None,
    data: Annotated[int, typer.Option(min=1, help="Size of the data axis: the number of replicas.")] = 1,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of configurations, for editors.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="Print the table of all keys.")] = False,
) -> None:
    """Check a configuration, and print it with every default and all three batch sizes filled in."""
    if sum((file is not None, schema, table)) != 1:
        raise ConfigError("Give one of a FILE to check, --schema and --table.")
    from ..compat.deepspeed.config.document import json_schema, markdown

    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
    elif table:
        typer.echo(markdown())
    else:
        assert file is not None
        _check(file, data)


def _check(file: Path, data: int) -> None:
    """Check a file and print it resolved. What a Trainer fills in stays "auto", and is explained."""
    from ..base.json_comments import read_json
    from ..compat.deepspeed.config.elasticity import described
    from ..compat.deepspeed.config.to_options import batch_sizes, notes_of, options_of
    from ..compat.deepspeed.from_config import read_config, resolve_config  # needs torch
    from ..compat.huggingface.auto_values import trainer_values

    source = read_json(file)
    given, origins = trainer_values(source) if isinstance(source, dict) else (source, {})
    checked = read_config(given)
    resolved = resolve_config(checked, batch_sizes(checked, data))
    notes = []
    if origins:
        notes = ["triax.Trainer fills in, from its TrainingArguments (a script without it writes values there):"]
        notes += [f"  {key} = {origin}" for key, origin in origins.items()]
    elif options_of(checked).tunes_microbatch:
        notes.append(
            'train_micro_batch_size_per_gpu is "auto": for a PipelineModule the largest that fits is found when the '
            "engine is made (docs/plan.md); else it follows from train_batch_size, as printed"
        )
    for key in origins:
        *sections, name = key.split(".")
        values: Any = resolved
        for section in sections:
            values = values.get(section) or {}
        values[name] = "auto"
    typer.echo(json.dumps(resolved, indent=2))
    if checked.elasticity.enabled:
        notes.append(described(checked.elasticity))
    for note in [*notes, *notes_of(checked)]:
        echo(f"triax: {note}", err=True)
