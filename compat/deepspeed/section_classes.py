"""Sections of configurations under the names of DeepSpeed's classes: ``DeepSpeedZeroConfig(stage=2)``.

names.toml lists the classes, and the sections that they make.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from ...base.foreign_tables import read_table
from .config.read import Section, checked_section
from .config.table import Table, table, table_of
from .ledger import TABLES


@cache
def inference_table() -> Table:
    """Return the table of the keys of ``init_inference``'s configuration."""
    return table_of(read_table(__file__, "inference.toml"), "its configuration")


class SectionClass(Section):
    """Section that is made from its keys.

    Attributes:
        ROWS: its table.
    """

    ROWS: ClassVar[Table]

    def __init__(self, **values: Any) -> None:
        made = checked_section(self.ROWS, values)
        super().__init__(made.table, made.values, made.given)


@cache
def section_class(name: str) -> type[SectionClass]:
    """Return the class of a section by DeepSpeed's name of the class.

    Raises:
        AttributeError: there is none of this name.
    """
    for listed, rows in (("classes", table), ("inference_classes", inference_table)):
        for path, known in TABLES[listed].items():
            if known == name:
                doc = f"Section ``{path}``." if path else "The whole configuration."
                return type(name, (SectionClass,), {"ROWS": rows().at(path), "__doc__": doc, "__module__": __name__})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __getattr__(name: str) -> Any:
    return section_class(name)
