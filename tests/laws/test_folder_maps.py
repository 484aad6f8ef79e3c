"""Each folder has a map, the docstring of its ``__init__.py``, which names every file of the folder and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.import_reader import library
from support.paths import ROOT

_FILE = re.compile(r"(?<![\w/])(\w+\.py)\b")
_EXAMPLES = {"script.py", "train.py"}  # a user's script, in texts


def wrong_maps(root: Path) -> Iterator[str]:
    """Yield the files that their folder's map leaves out, and the names in a map that are no file of the folder."""
    files = [Path(file) for file in library(root)]
    files += [file.relative_to(root) for file in root.glob("tests/support/*.py")]
    for folder in sorted({file.parent for file in files} - {Path(".")}):
        here = {file.name for file in files if file.parent == folder} - {"__init__.py"}
        text = ast.get_docstring(ast.parse((root / folder / "__init__.py").read_bytes())) or ""
        named = set(_FILE.findall(text))
        yield from (f"{folder}/__init__.py does not name {name}" for name in sorted(here - named))
        yield from (
            f"{folder}/__init__.py names {name}, which is not there" for name in sorted(named - here - _EXAMPLES)
        )


def test_each_file_is_named_in_the_map_of_its_folder() -> None:
    found = list(wrong_maps(ROOT))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a.py: this. b.py: that.", "does not name c.py"),
        ("a.py, b.py, c.py and d.py", "names d.py, which is not there"),
    ],
)
def test_the_law_of_folder_maps_names_the_missing_file(text: str, found: str, tmp_path: Path) -> None:
    folder = tmp_path / "pipe"
    folder.mkdir()
    (folder / "__init__.py").write_text(f'"""{text}"""\n')
    for name in "abc":
        (folder / f"{name}.py").touch()
    assert [line.partition(" ")[2] for line in wrong_maps(tmp_path)] == [found]
