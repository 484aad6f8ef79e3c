"""The configuration with its defaults filled in, its JSON schema, and the table of its keys."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from ....options.batch import BatchSizes
from .base import Section, extra_of, inner_section
from .schema import Config


def resolved(config: Config, batch: BatchSizes) -> dict[str, Any]:
    """Return the configuration with every default filled in, as JSON has it, without the keys that do nothing.

    The arguments of ``optimizer`` and ``scheduler`` stay as given: ``engine/setup/check.py`` fills in their defaults.
    """
    values = _acting(config)
    if config.elasticity.enabled:  # the batch sizes below are those that it chose
        values["elasticity"]["ignore_non_elastic_batch_info"] = True
    return values | {
        "train_batch_size": batch.train,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
    }


def json_schema() -> dict[str, Any]:
    """Return a JSON schema of the configuration, with which editors complete and check files."""
    made = Config.model_json_schema()
    made["title"] = "triax configuration"
    made["properties"]["$schema"] = {"type": "string", "description": "Address of this schema."}
    for section in (made, *made.get("$defs", {}).values()):
        for key, entry in section.get("properties", {}).items():
            entry.pop("title", None)
            status, off = entry.pop("x-status", None), entry.pop("x-off", [])
            entry.pop("x-needs", None)
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
                    "anyOf": [{"enum": [None, False, [], *off]}, disabled, empty],
                    "description": f"Refused: {entry['description']}.",
                    "deprecated": True,
                }
    return made


def markdown() -> str:
    """Return a Markdown table of every key: default, meaning, and the status: acts, idle, refused."""
    lines = ["| key | default | meaning | |", "|---|---|---|---|"]
    for key, field in keys():
        extra = extra_of(field)
        status = extra.get("x-status", "acts")
        default = _default(field)
        hidden = status in ("idle", "refused") or field.is_required() or isinstance(default, Section)
        shown = "" if hidden else f"`{json.dumps(default)}`"
        if "x-auto" in extra and default is None:
            shown = '`"auto"`'
        text = field.description if field.description.endswith(".") else f"{field.description}."
        status = {"inert": "idle", "older": "acts"}.get(status, status)
        lines.append(f"| `{key}` | {shown} | {text.replace('|', chr(92) + '|')} | {status} |")
    return "\n".join(lines)


def keys(
    section: type[Section] = Config, prefix: str = "", whole: Collection[type[Section]] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield every key of a section, inner sections too: active keys, then idle ones, then refused ones.

    Args:
        section: the section.
        prefix: what each key begins with.
        whole: sections that are yielded as one key.
    """
    order = {None: 0, "inert": 1, "older": 1, "idle": 2, "refused": 3}
    fields = sorted(section.model_fields.items(), key=lambda item: order[extra_of(item[1]).get("x-status")])
    for name, field in fields:
        inner = inner_section(field.annotation)
        if inner is None or inner in whole:
            yield prefix + (field.alias or name), field
        else:
            yield from keys(inner, f"{prefix}{name}.", whole)


def _acting(section: Section) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, field in type(section).model_fields.items():
        if "x-status" not in extra_of(field) and not section.types_of(key):
            value = getattr(section, key)
            values[field.alias or key] = _acting(value) if isinstance(value, Section) else value
    return values


def _default(field: Any) -> Any:
    return field.get_default(call_default_factory=True)
