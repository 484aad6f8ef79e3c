"""The notebooks of docs/notebooks: every cell runs, in order, in a Jupyter kernel, as a reader would run it.

Their last cells assert what they claim, so a notebook that ends without an error has proved it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from paths import DOCS

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
QUICK = {"schedules"}  # no other one runs without torch and without processes
RUNS = [
    pytest.param(file, id=file.stem, marks=() if file.stem in QUICK else pytest.mark.exhaustive) for file in NOTEBOOKS
]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_kept_short_and_without_outputs(file: Path) -> None:
    book = nbformat.read(file, as_version=4)  # which also validates it
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert (book.nbformat, book.metadata.kernelspec.name) == (4, "python3")
    assert 8 <= len(book.cells) <= 15 and book.cells[0].source.startswith("# ")
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert book.cells[-1].cell_type == "code"
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(book.cells[-1].source)))


@pytest.mark.parametrize("file", RUNS)
def test_a_notebook_runs_to_its_last_assertion(file: Path, tmp_path: Path) -> None:
    book = nbformat.read(file, as_version=4)
    NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
