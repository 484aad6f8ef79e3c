"""The notebooks of docs/notebooks: every cell runs, in order, in a Jupyter kernel, as a reader would run it.

Their last cells assert what they claim, so a notebook that ends without an error has proved it. Their outputs are
stored in them, for the site and for who reads them without running them: `python tests/examples/test_notebooks.py`
runs them all and stores them anew.
"""

from __future__ import annotations

import ast
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
import pytest
from nbclient import NotebookClient

import triax

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.ipynb"))
QUICK = {"schedules"}  # no other one runs without torch and without processes
RUNS = [
    pytest.param(file, id=file.stem, marks=() if file.stem in QUICK else pytest.mark.exhaustive) for file in NOTEBOOKS
]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_kept_short_with_the_outputs_of_one_run(file: Path) -> None:
    book = nbformat.read(file, as_version=4)  # which also validates it
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert (book.nbformat, book.metadata.kernelspec.name) == (4, "python3")
    assert 8 <= len(book.cells) <= 15 and book.cells[0].source.startswith("# ")
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert not any("execution" in cell.metadata for cell in code)  # the times, which change in each run
    assert "image/png" in set().union(*map(kinds_of_output, code))
    assert file.stat().st_size < 500_000
    assert book.cells[-1].cell_type == "code"
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(book.cells[-1].source)))


@pytest.mark.parametrize("file", RUNS)
def test_a_notebook_runs_to_its_last_assertion(file: Path, tmp_path: Path) -> None:
    book = nbformat.read(file, as_version=4)
    stored = [kinds_of_output(cell) for cell in book.cells]
    run(book, tmp_path)
    assert [kinds_of_output(cell) for cell in book.cells] == stored


def test_a_notebook_shows_schedules_models_and_grids(tmp_path: Path) -> None:
    """A schedule is a picture; a module and a grid are tables of what they have."""
    begin = "import torch, triax; grid = triax.Grid(); up = triax.LayerSpec(torch.nn.Linear, 4, 8)\n"
    cells = [
        "triax.make_schedule('zb-v', 4, 8)",
        begin + "grid",
        "triax.PipelineModule([up, torch.relu, *[triax.LayerSpec(torch.nn.Linear, 8, 8)] * 2], grid=grid)",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in ("import triax", *cells)])
    run(book, tmp_path)
    picture, axes, stages = (cell.outputs[-1].data for cell in book.cells[1:])
    assert ElementTree.fromstring(picture["image/svg+xml"]).tag.endswith("svg")
    assert rows_of(axes["text/html"]) == [
        ["axis", "size", "coordinate of this rank"],
        *([name, "1", "0"] for name in ("pipe", "data", "tensor")),
    ]
    assert rows_of(stages["text/html"]) == [
        ["stage", "rank of the pipe axis", "layers", "parameters"],
        ["0", "0", "0-3: Linear, relu, 2 x Linear", "184"],
    ]


def tables_on_rank() -> tuple[str, str]:
    grid = triax.Grid(pipe=2, tensor=2)
    layers = triax.gpt_layers(triax.GPTConfig(16, 8, 8, 3, 2))
    return grid._repr_html_(), triax.PipelineModule(layers, grid=grid, partition="uniform")._repr_html_()


def test_notebook_tables_show_the_whole_model_on_every_rank(ranks: Any) -> None:
    """Each stage with its whole layers, not the shards of this rank; the coordinates alone are a rank's own."""
    layers = triax.gpt_layers(triax.GPTConfig(16, 8, 8, 3, 2))
    whole = [sum(p.numel() for p in triax.PipelineModule([layer]).parameters()) for layer in layers]
    cut = (len(layers) + 1) // 2
    for rank, (axes, stages) in enumerate(ranks(4, tables_on_rank)):
        assert rows_of(axes)[1:] == [["pipe", "2", str(rank // 2)], ["data", "1", "0"], ["tensor", "2", str(rank % 2)]]
        found = [(row[:2], row[3]) for row in rows_of(stages)[1:]]
        assert found == [(["0", "0"], f"{sum(whole[:cut]):,}"), (["1", "1"], f"{sum(whole[cut:]):,}")]


def rows_of(table: str) -> list[list[str]]:
    return [["".join(cell.itertext()) for cell in row] for row in ElementTree.fromstring(table).iter("tr")]


def run(book: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells in a kernel of their own, and keep their outputs in the cells."""
    metadata = dict(book.metadata)
    NotebookClient(book, timeout=240, record_timing=False, resources={"metadata": {"path": str(folder)}}).execute()
    book.metadata = nbformat.from_dict(metadata)  # without the version of the Python that ran it


def kinds_of_output(cell: nbformat.NotebookNode) -> set[str]:
    """Name the streams and the mime types that a cell put out."""
    return {kind for output in cell.get("outputs", ()) for kind in output.get("data", (output.get("name", "error"),))}


if __name__ == "__main__":
    for notebook in NOTEBOOKS:
        cells = nbformat.read(notebook, as_version=4)
        with tempfile.TemporaryDirectory() as scratch:
            run(cells, Path(scratch))
        nbformat.write(cells, notebook)
