"""``triax config``: check a configuration and print it resolved, or print the JSON schema or the table of keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..config.config import batch_sizes
from ..config.resolved import json_schema, markdown
from ..grid.errors import ConfigError


def config(
    file: Annotated[Path | None, typer.Argument(help="Configuration file, in DeepSpeed's JSON dialect.")] = None,
    data: Annotated[int, typer.Option(min=1, help="Size of the data axis: the number of replicas.")] = 1,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of configurations, for editors.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="Print the table of all keys, as in docs/config.md.")] = False,
) -> None:
    """Check a configuration, and print it with every default and all three batch sizes filled in."""
    if sum((file is not None, schema, table)) != 1:
        raise ConfigError("Give one of a FILE to check, --schema and --table.")
    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
    elif table:
        typer.echo(markdown())
    else:
        from ..engine.setup.check import read_config, resolve_config  # needs torch

        assert file is not None
        checked = read_config(file)
        typer.echo(json.dumps(resolve_config(checked, batch_sizes(checked, data)), indent=2))
        if checked.elasticity.enabled:
            typer.echo(f"triax: {checked.elasticity.describe()}", err=True)
        for note in checked.notes():
            typer.echo(f"triax: {note}", err=True)
