"""Each test can fail: it, or a test function that it calls, asserts something that a fault would change."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.differences import largest
from support.import_reader import walk
from support.paths import ROOT

Place = tuple[str, str]  # file, name of a function or class in it
# Functions that raise where something is wrong: of torch, pytest and the library; and ``exec`` of a page's program.
RAISES = {"assert_close", "assert_equals_one_process", "exec", "fail", "raises", "verify", "warns"}


class Definitions:
    """Functions and values that the files of tests define, and the names that these files import from each other.

    Args:
        root: the checkout.
    """

    def __init__(self, root: Path) -> None:
        self.functions: dict[Place, ast.AST] = {}
        self._imported: dict[Place, Place] = {}
        for path in sorted(root.glob("tests/**/*.py")):
            file = str(path.relative_to(root / "tests"))
            for node in walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self.functions[file, node.name] = node
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self.functions.setdefault((file, node.targets[0].id), node.value)  # for example a partial
                elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("support", "laws"):
                    of = (node.module or "").replace(".", "/") + ".py"
                    self._imported |= {(file, name.asname or name.name): (of, name.name) for name in node.names}

    def can_fail(self, place: Place, seen: set[Place]) -> bool:
        """Return True if a function asserts, raises, or names a function of the tests that does."""
        seen.add(place)
        nodes = walk(self.functions[place])
        names = [node.id for node in nodes if isinstance(node, ast.Name)]
        names += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
        if any(isinstance(node, ast.Assert | ast.Raise) for node in nodes) or RAISES & {*names}:
            return True
        keywords = [node for node in nodes if isinstance(node, ast.keyword) and node.arg == "check"]
        if "check=True" in map(ast.unparse, keywords):
            return True  # subprocess.run raises
        places = [(place[0], name) for name in names]
        places = [self._imported.get(other, other) for other in places]
        return any(self.can_fail(other, seen) for other in places if other in self.functions and other not in seen)


def holds_always(condition: ast.expr) -> bool:
    """Return True for a condition that hardly any fault changes: an object's truth or type, a number of at least 0."""
    match condition:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(map(holds_always, values))
        case ast.Attribute() | ast.Call(func=ast.Name(id="isinstance" | "callable" | "hasattr" | "len")):
            return True
        case ast.Compare(ops=[ast.GtE()], comparators=[ast.Constant(value=0)]):
            return True
        case ast.Compare(ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
    return False


def weak_tests(root: Path) -> Iterator[str]:
    """Yield the tests that cannot fail, and those whose assertions all hold always."""
    tests = Definitions(root)
    for (file, name), node in tests.functions.items():
        if name.startswith("test_") and isinstance(node, ast.FunctionDef):
            nodes = walk(node)
            asserts = [each for each in nodes if isinstance(each, ast.Assert)]
            raises = any(isinstance(each, ast.Attribute) and each.attr in RAISES for each in nodes)
            if not tests.can_fail((file, name), set()):
                yield f"tests/{file}: {name} asserts nothing"
            elif asserts and not raises and all(holds_always(each.test) for each in asserts):
                yield f"tests/{file}: {name} asserts what hardly any fault changes"


def test_each_test_can_fail() -> None:
    found = list(weak_tests(ROOT))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("run()", "asserts nothing"),
        ("helper()", None),
        ("assert isinstance(run(), int) and run().length >= 0", "asserts what hardly any fault changes"),
        ("assert run() is not None", "asserts what hardly any fault changes"),
        ("assert run() == 3", None),
    ],
)
def test_the_law_of_assertions_complains_of_offenders_only(body: str, complaint: str | None, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    text = f"def helper():\n    assert 1 == 1\n\ndef test_it():\n    {body}\n"
    (tmp_path / "tests" / "test_a.py").write_text(text)
    assert list(weak_tests(tmp_path)) == ([f"tests/test_a.py: test_it {complaint}"] if complaint else [])


def passes_over_nan(source: str) -> list[str]:
    """Return the calls of Python's ``max`` over differences of tensors, which NaN does not make large."""
    calls = [node for node in walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "max" and isinstance(call.args[0], ast.GeneratorExp)
        if any(isinstance(node, ast.Attribute) and node.attr in ("abs", "norm") for node in walk(call))
    ]


def test_the_largest_difference_of_tensors_is_nan_if_one_is() -> None:
    """``max((0.1, nan))`` is 0.1: the tests have ``support.differences.largest`` for it."""
    found = [
        f"{path}: {text}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for text in passes_over_nan(path.read_text())
    ]
    assert not found, "\n".join(found)
    assert passes_over_nan("worst = max((a - b).abs().max() for a, b in pairs)")
    assert math.isnan(largest([0.1, math.nan])) and largest([0.1, 0.3]) == pytest.approx(0.3)
