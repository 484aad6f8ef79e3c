"""The configuration with its defaults filled in, its JSON schema, and the table of its keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from ....options.batch import BatchSizes
from .read import Section
from .table import Key, Table, keys, table

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}
_LIMITS = {"least": "minimum", "above": "exclusiveMinimum", "most": "maximum", "below": "exclusiveMaximum"}


def resolved(config: Section, batch: BatchSizes) -> dict[str, Any]:
    """Return the configuration with every default filled in, as JSON has it, without the keys that do nothing.

    The arguments of ``optimizer`` and ``scheduler`` stay as given: ``engine/setup/check_names.py`` fills in their
    defaults.
    """
    values = _acting(config)
    if config.elasticity.enabled:  # the batch sizes below are those that it chose
        values["elasticity"]["ignore_non_elastic_batch_info"] = True
    return values | {
        "train_batch_size": batch.train,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
    }


def _acting(section: Section) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in section.values.items():
        key = section.table.keys.get(name)
        if isinstance(value, Section):
            values[name] = _acting(value)
        elif key is None or (key.status == "acts" and _is_of_type(key, section)):
            values[name] = value
    return values


def _is_of_type(key: Key, section: Section) -> bool:
    types = key.row.get("types")
    return types is None or section.values["type"] in types


def markdown() -> str:
    """Return a Markdown table of every key: default, meaning, and the status: acts, idle, refused."""
    lines = ["| key | default | meaning | |", "|---|---|---|---|"]
    for path, key in keys():
        hidden = key.status in ("idle", "refused") or "required" in key.row
        shown = '"auto"' if "auto" in key.row and key.default is None else json.dumps(key.default)
        text = key.doc if key.doc.endswith(".") else f"{key.doc}."
        status = {"inert": "idle", "older": "acts"}.get(key.status, key.status)
        default = "" if hidden else f"`{shown}`"
        lines.append(f"| `{path}` | {default} | {text.replace('|', chr(92) + '|')} | {status} |")
    return "\n".join(lines)


def json_schema() -> dict[str, Any]:
    """Return a JSON schema of the configuration, with which editors complete and check files."""
    made = {"title": "triax configuration", **_schema_of_section(table())}
    made["properties"]["$schema"] = {"type": "string", "description": "Address of this schema."}
    return made


def _schema_of_section(rows: Table) -> dict[str, Any]:
    values = {key.name: _schema_of_key(key) for key in rows.keys.values()}
    sections = {name: _schema_of_section(inner) for name, inner in rows.sections.items()}
    properties: dict[str, Any] = values | sections
    properties |= {other: properties[name] for other, name in rows.other_names.items()}
    required = [key.name for key in rows.keys.values() if "required" in key.row]
    made: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    made |= {"required": required} if required else {}
    short = [json.loads(word) for word in rows.row.get("short", {})] + [None] * ("optional" in rows.row)
    about = {"description": rows.row["doc"]} if "doc" in rows.row else {}
    return {**about, "anyOf": [made, {"enum": short}]} if short else {**about, **made}


def _schema_of_key(key: Key) -> dict[str, Any]:
    if key.status == "refused":
        disabled = {"type": "object", "properties": {"enabled": {"const": False}}, "required": ["enabled"]}
        off = [{"enum": [None, False, [], *key.row.get("off", ())]}, disabled, {"type": "object", "maxProperties": 0}]
        return {"anyOf": off, "description": f"Refused: {key.doc}.", "deprecated": True}
    if key.status == "idle":
        return {"description": f"Does nothing: {key.doc}.", "deprecated": True}
    kinds = [_schema_of_type(kind, key.limits) for kind in key.kinds]
    kinds += [{"type": "null"}] * key.takes_null + [{"const": "auto"}] * ("auto" in key.row)
    made = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    default = {} if "required" in key.row else {"default": key.default}
    return {**made, "description": key.doc, **default}


def _schema_of_type(kind: Any, limits: Mapping[str, float]) -> dict[str, Any]:
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _schema_of_type(get_args(kind)[0], limits)}
    bounds = {_LIMITS[name]: limit for name, limit in limits.items()} if kind in (int, float) else {}
    return {"type": _TYPES[get_origin(kind) or kind], **bounds}
