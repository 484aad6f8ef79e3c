"""The budget of code lines of each folder, without docstrings, comments and blank lines.

A change that goes over the line of its room raises the number here, in the same commit, and says why in the changelog;
a change that saves lines lowers it: ``python tests/laws/test_budget.py`` prints the table. The sum only falls, except
for a new capability. Lines are saved by design, never by squeezing.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.import_reader import library, statements  # found by the line above

BUDGET = {
    "plugins": 10573,
    "models": 9592,
    "engine": 8567,
    "pipe": 7640,
    "compat": 7072,
    "zero": 5870,
    "grid": 4839,
    "train": 4454,
    "cli": 3612,
    "data": 2471,
    "checkpoint": 2238,
    "tensor_parallel": 2234,
    "options": 1603,
    "inference": 1523,
    "context": 1473,
    "base": 1460,
    "testing": 1458,
    "moe": 1118,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SLACK = 40  # lines of a room that may be saved before the number must be lowered


def code_lines(source: str) -> int:
    """Return the number of lines of a file that have code."""
    left_out, docstrings = set[int](), 0
    for node in statements(ast.parse(source)):
        text = node.body[0] if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None else None
        if text is not None:
            left_out |= {*range(text.lineno, (text.end_lineno or text.lineno) + 1)}
            docstrings += 1
    lines = source.split("\n")
    if source.count('"""') <= 2 * docstrings and "'''" not in source:  # no other string has several lines
        return sum(1 for n, line in enumerate(lines, 1) if line.strip()[:1] not in ("", "#") and n not in left_out)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1].strip().startswith("#"):
            left_out.add(token.start[0])
    return sum(1 for number, line in enumerate(lines, 1) if line.strip() and number not in left_out)


def counted(root: Path) -> Counter[str]:
    """Return the code lines of each room."""
    lines = Counter[str]()
    for file in library(root):
        if "/" in file:
            lines[file.split("/")[0]] += code_lines((root / file).read_text(encoding="utf-8"))
    return lines


def test_no_folder_has_more_code_lines_than_its_budget() -> None:
    lines = counted(ROOT)
    assert lines.keys() == BUDGET.keys()
    over = [
        f"{room}/ has {lines[room]} code lines, over {BUDGET[room]}" for room in BUDGET if lines[room] > BUDGET[room]
    ]
    assert not over, "; ".join(over) + ": save lines by design, or raise the number and say why in the changelog"
    saved = [f'"{room}": {lines[room]}' for room in BUDGET if lines[room] < BUDGET[room] - SLACK]
    assert not saved, f"lines were saved; lower the budget, so that they stay saved: {', '.join(saved)}"


def test_code_lines_exclude_comments_and_docstrings() -> None:
    source = (
        '"""Text.\n\nMore."""\n\n# a comment\nx = 1  # counted\n\ndef f():\n    """Text."""\n    return """a\nb"""\n'
    )
    assert code_lines(source) == 4


if __name__ == "__main__":
    table = counted(ROOT)
    print(*(f'    "{room}": {count},' for room, count in table.most_common()), f"    # {sum(table.values())}", sep="\n")
