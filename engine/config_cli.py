"""``triax config``: a configuration checked and resolved, its JSON schema, and the table of its keys."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from .config import Batch, Config, ConfigError, batch_sizes, read_config
from .config_base import Section, extra_of


def config(
    file: Annotated[Path | None, typer.Argument(help="A configuration in DeepSpeed's JSON dialect.")] = None,
    data_parallel: Annotated[
        int, typer.Option("--data-parallel", "--replicas", min=1, help="The size of the data axis.")
    ] = 1,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema, for editors.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Print the table of all keys, as in docs/config.md.")] = False,
) -> None:
    """Check a configuration and print it resolved: defaults filled in, all three batch sizes."""
    if sum((file is not None, schema, table)) != 1:
        raise ConfigError("triax config takes a FILE to check, or --schema, or --table")
    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
    elif table:
        typer.echo(markdown())
    else:
        assert file is not None
        checked = read_config(file)
        typer.echo(json.dumps(resolved(checked, batch_sizes(checked, data_parallel)), indent=2))
        for note in checked.notes():
            typer.echo(f"triax: {note}", err=True)


def resolved(config: Config, batch: Batch) -> dict[str, Any]:
    """The configuration with every default filled in, as JSON has it; without what does nothing."""
    values = _acting(config) | {
        "train_batch_size": batch.train,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
    }
    if config.optimizer is not None:
        from .optimizers import resolve

        cls, params = resolve(config.optimizer)
        values["optimizer"] = {"type": cls.__name__, "params": _with_defaults(cls, params, "params")}
    if config.scheduler is not None:
        from .schedulers import known

        classes = {name.lower(): cls for name, cls in known().items()}
        kind = classes[config.scheduler.type.lower()]
        given = {key: value for key, value in config.scheduler.params.items() if value != "auto"}
        values["scheduler"] = {"type": kind.__name__, "params": _with_defaults(kind, given, "optimizer")}
    return values


def json_schema() -> dict[str, Any]:
    """A JSON schema of the configuration: what an editor completes, explains and underlines."""
    made = Config.model_json_schema()
    made["title"] = "triax configuration"
    made["properties"]["$schema"] = {"type": "string", "description": "Where this schema is."}
    for section in (made, *made.get("$defs", {}).values()):
        for key, entry in section.get("properties", {}).items():
            entry.pop("title", None)
            status, nothing = entry.pop("x-status", None), entry.pop("x-nothing", [])
            if "x-auto" in entry:
                entry.pop("x-auto")
                kept = {name: entry.pop(name) for name in ("description", "default") if name in entry}
                section["properties"][key] = {"anyOf": [entry, {"const": "auto"}], **kept}
            elif status == "idle":  # (the inert have types of their own)
                entry |= {"description": f"Does nothing: {entry['description']}.", "deprecated": True}
            elif status == "refused":
                disabled = {"type": "object", "properties": {"enabled": {"const": False}}, "required": ["enabled"]}
                empty = {"type": "object", "maxProperties": 0}
                section["properties"][key] = {
                    "anyOf": [{"enum": [None, False, [], *nothing]}, disabled, empty],
                    "description": f"Refused: {entry['description']}.",
                    "deprecated": True,
                }
    return made


def markdown() -> str:
    """A table of every key: default, meaning, and whether it acts."""
    lines = ["| key | default | meaning | |", "|---|---|---|---|"]
    for key, field in keys():
        extra = extra_of(field)
        status = extra.get("x-status", "acts")
        default = "" if status in ("idle", "refused") or field.is_required() else f"`{json.dumps(_default(field))}`"
        if "x-auto" in extra and _default(field) is None:
            default = '`"auto"`'
        text = field.description if field.description.endswith(".") else f"{field.description}."
        status = {"inert": "idle", "older": "acts"}.get(status, status)
        lines.append(f"| `{key}` | {default} | {text.replace('|', chr(92) + '|')} | {status} |")
    return "\n".join(lines)


def keys(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the configuration, in the order of the models; those that act first, then idle, then refused."""
    order = {None: 0, "inert": 1, "older": 1, "idle": 2, "refused": 3}
    fields = sorted(section.model_fields.items(), key=lambda item: order[extra_of(item[1]).get("x-status")])
    for name, field in fields:
        inner = inner_section(field.annotation)
        if inner is None:
            yield prefix + (field.alias or name), field
        else:
            yield from keys(inner, f"{prefix}{name}.")


def inner_section(annotation: Any) -> type[Section] | None:
    """The section that a key holds; None where it holds a value."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, Section)), None)


def _acting(section: Section) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, field in type(section).model_fields.items():
        if "x-status" not in extra_of(field):
            value = getattr(section, key)
            values[field.alias or key] = _acting(value) if isinstance(value, Section) else value
    return values


def _with_defaults(made: type, given: dict[str, Any], first: str) -> dict[str, Any]:
    parameters = inspect.signature(made).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name != first and p.default is not inspect.Parameter.empty}
    return defaults | given


def _default(field: Any) -> Any:
    return field.get_default(call_default_factory=True)
