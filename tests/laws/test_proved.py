"""docs/proved.md has whole rows of cells, and each cell says what `triax check` finds."""

from __future__ import annotations

import os
import re

import pytest

from laws import proved


def cells_of(page: str) -> dict[tuple[str, str, str], str]:
    """(method, type, axis) -> the cell."""
    found: dict[tuple[str, str, str], str] = {}
    for section in page.split("\n## ")[1:]:
        method, _, table = section.partition(":")
        for kind, *row in re.findall(r"^\| (\w+) " + r"\| ([^|]*?) " * len(proved.AXES) + r"\|$", table, re.MULTILINE):
            if kind != "type":
                found |= {(method, kind, axis): cell for axis, cell in zip(proved.AXES, row, strict=True)}
    return found


def test_the_page_has_every_cell_of_its_tables() -> None:
    page = proved.PAGE.read_text()
    found = cells_of(page)
    kept = proved.written()
    assert proved.page((k, m, row) for m in proved.METHODS for k, row in kept.get(m, ())) == page
    every = {(m, k, a) for m in proved.METHODS for k in proved.kinds() for a in proved.AXES}
    assert {cell for cell in every if cell[0] in ("full", "lora", "sft", "dpo")} <= found.keys() <= every
    assert all((m, k, a) in found for m in proved.METHODS for k in ("llama", "mixtral", "mamba2") for a in proved.AXES)
    assert found == {cell: found[cell] for cell in every if (cell[0], cell[1], "pipe") in found}  # whole rows
    refused = {int(number) for cell in found.values() for number in re.findall(r"^refused \((\d+)\)$", cell)}
    assert all(cell == "equal" or cell.startswith("refused (") for cell in found.values())
    assert refused == {int(number) for number in re.findall(r"^(\d+)\. \S", page, re.MULTILINE)}


KINDS = [
    (kind, method)
    if (kind, method) in (("qwen3_moe", "dpo"),)
    else pytest.param(kind, method, marks=pytest.mark.exhaustive)
    for kind in proved.kinds()
    for method in proved.METHODS
]


@pytest.mark.parametrize(("kind", "method"), KINDS)
def test_each_cell_of_the_page_is_what_a_check_finds(kind: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    page = proved.PAGE.read_text()
    if (method, kind, "pipe") not in cells_of(page):
        pytest.skip("the page says nothing of it")
    said = dict(re.findall(r"^(\d+)\. (.*)$", page, re.MULTILINE))
    for axis, text in proved.cells(kind, method).items():
        cell = cells_of(page)[method, kind, axis]
        assert text == ("" if cell == "equal" else said[cell.removeprefix("refused (").removesuffix(")")])
