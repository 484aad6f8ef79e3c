"""Every name of another library has the answer that it had before the tables of names were data files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from triax.base.errors import ConfigError
from triax.base.foreign_tables import answers, markdown, read_table
from triax.compat import launcher_options
from triax.compat.deepspeed import section_classes
from triax.compat.deepspeed.config.checks import OTHER_NAMES
from triax.compat.deepspeed.config.optimizer_names import native_optimizer
from triax.compat.deepspeed.engine import METHODS, NEEDS
from triax.compat.deepspeed.ledger import TABLES
from triax.compat.huggingface import pipeline
from triax.compat.megatron import checkpoint as from_megatron
from triax.options.foreign_names import counterpart
from triax.train.older_keys import MOVED

from support.paths import ROOT

# A door, a name, and the answer.
RECORDED = [json.loads(line) for line in (ROOT / "tests/compat/foreign_names.jsonl").read_text().splitlines()]
TRAINER = read_table(pipeline.__file__, "arguments.toml")


class Asked(dict[str, Any]):
    """Answers of a function, by its argument."""

    def __missing__(self, name: str) -> Any:
        return self["function"](name)


def key(name: str, in_file: bool) -> str | None:
    *place, last = name.split(".")
    return counterpart(place, last, in_file)


def optimizer(name: str) -> Any:
    """Return an optimizer by DeepSpeed's name, with an argument behind a point, or what refuses it."""
    kind, _, argument = name.partition(".")
    given = {"cuda_aware": False, "comm_backend_name": ""}.get(argument, True)
    try:
        made = native_optimizer(kind, {argument: given} if argument else {})
    except ConfigError as error:
        return str(error)
    return [made.type, made.arguments]


def section_class(name: str) -> list[str]:
    rows = getattr(section_classes, name).ROWS
    return [rows.path, rows.file]


DOORS: dict[str, Mapping[str, Any]] = {
    "training file": Asked(function=lambda name: key(name, True)),
    "configuration": Asked(function=lambda name: key(name, False)),
    "launcher: same": {other: own for own, others in launcher_options.SAME.items() for other in others},
    "launcher: replaced": launcher_options.REPLACED,
    "launcher: idle": launcher_options.IDLE,
    "launcher: refused": launcher_options.REFUSED,
    "launcher: starter": launcher_options.STARTERS,
    "launcher: equivalent": {
        f"{own} {other}": own for own, others in launcher_options.EQUIVALENTS.items() for other in others
    },
    "older key": MOVED,
    "TrainingArguments": answers(TRAINER["refused"]),
    "Trainer's checkpoint": answers(TRAINER["checkpoint"]),
    "TRL": answers(TRAINER["trainers"]),
    "older member": TABLES["native_members"],
    "engine property": TABLES["properties"],
    "pipeline engine property": TABLES["pipeline_properties"],
    "engine method": METHODS,
    "pipeline engine method": TABLES["pipeline_methods"],
    "engine needs": NEEDS,
    "section class": Asked(function=section_class),
    "grid attribute": TABLES["grid_attributes"],
    "grid axis": TABLES["grid_axes"],
    "grid group": TABLES["grid_groups"],
    "operation": OTHER_NAMES,
    "optimizer": Asked(function=optimizer),
    "Megatron argument": read_table(from_megatron.__file__, "arguments.toml")["needs"],
    "Megatron name": read_table(from_megatron.__file__, "arguments.toml")["names"],
}


@pytest.mark.parametrize("door", DOORS)
def test_every_recorded_answer_is_unchanged(door: str) -> None:
    recorded = {name: answer for found, name, answer in RECORDED if found == door}
    assert recorded and json.loads(json.dumps({name: DOORS[door][name] for name in recorded})) == recorded


def test_every_table_of_names_has_recorded_answers() -> None:
    assert {door for door, *_ in RECORDED} == {*DOORS} and len(RECORDED) > 850


@pytest.mark.parametrize(
    ("page", "heads", "rows"),
    [
        ("launch", ("option", "why it does nothing"), launcher_options.TABLES["idle"]),
        ("launch", ("option", "what to do instead"), launcher_options.TABLES["refused"]),
        ("huggingface", ("argument", "what to do instead"), TRAINER["refused"]),
        ("huggingface", ("argument", "why it is not supported over stages"), TRAINER["in_stages"]),
    ],
    ids=str,
)
def test_pages_print_the_tables_of_the_data_files(page: str, heads: tuple[str, str], rows: Mapping[str, str]) -> None:
    assert markdown(*heads, rows) in (ROOT / f"docs/{page}.md").read_text()
