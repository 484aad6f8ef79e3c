"""Laws of names and docstrings (docs/inside/why.md): one class per name; docstrings that name their thing."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.import_reader import library, statements, walk
from support.paths import ROOT

# First words of a docstring that do not name the thing: relative clauses, pronouns, references to another docstring.
VAGUE = re.compile(r"(What|Whether|Where|Which|Who|How|The same|Of|It|Its|See|As|That|Those)\b")
# Methods that change a list, dict, set or deque.
CHANGES = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"}
CHANGES |= {"setdefault", "update"}
# One named context per adapter whose API is global.
CONTEXTS = {"compat/horovod/context.py": ("_context",), "compat/deepspeed/context.py": ("CONTEXT",)}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def classes(root: Path) -> Iterator[tuple[str, str]]:
    """Each class at the top of a file: its name without underscores in front, and where it is."""
    for file in library(root):
        for node in ast.parse((root / file).read_bytes()).body:
            if isinstance(node, ast.ClassDef):
                yield node.name.lstrip("_"), f"{file}:{node.lineno}"


def shared_class_names(root: Path) -> Iterator[str]:
    where = defaultdict(list)
    for name, place in classes(root):
        where[name].append(place)
    for name, places in sorted(where.items()):
        if len(places) > 1:
            yield f"{name} is {len(places)} classes: {', '.join(places)}"


def mutable_globals(root: Path) -> Iterator[str]:
    """Names at the top of a module that some function changes."""
    for file in library(root):
        tree = ast.parse((root / file).read_bytes())
        names = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        if not names:
            continue
        for function in (node for node in walk(tree) if isinstance(node, FUNCTIONS)):
            nodes = walk(function)
            local = {node.arg for node in nodes if isinstance(node, ast.arg)}
            local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            shared = names - local - {*CONTEXTS.get(file, ())}
            for node in nodes:
                line = getattr(node, "lineno", 0)
                changed: ast.expr | None = None
                if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                    changed = node.value
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                    changed = node.func.value
                elif isinstance(node, ast.Global) and not set(node.names) <= {*CONTEXTS.get(file, ())}:
                    yield f"{file}:{line} writes the global {', '.join(node.names)}"
                if isinstance(changed, ast.Name) and changed.id in shared:
                    yield f"{file}:{line} changes the global {changed.id}"


def docstrings(root: Path) -> Iterator[tuple[str, str]]:
    for file in library(root):
        for node in statements(ast.parse((root / file).read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{file}:{getattr(node, 'lineno', 1)}", text.splitlines()[0]


def test_a_class_name_means_one_class() -> None:
    found = list(shared_class_names(ROOT))
    assert not found, "\n" + "\n".join(found)


def test_no_module_has_mutable_state() -> None:
    found = sorted(set(mutable_globals(ROOT)))
    assert not found, "\n" + "\n".join(found)


def vague_docstrings(root: Path) -> Iterator[str]:
    for place, line in docstrings(root):
        if VAGUE.match(line):
            yield f"{place} begins with a vague word: {line}"


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """At most one docstring in a hundred begins with a word of ``VAGUE``."""
    vague, everywhere = list(vague_docstrings(ROOT)), list(docstrings(ROOT))
    print(f"{len(vague)} of {len(everywhere)} docstrings begin with a vague word")
    assert len(vague) * 100 <= len(everywhere), "\n" + "\n".join(vague)


@pytest.mark.parametrize(
    ("law", "text", "complaint"),
    [
        (shared_class_names, "class A: ...\nclass _A: ...", "A is 2 classes: zero/a.py:1, zero/a.py:2"),
        (shared_class_names, "class A: ...\nclass B: ...", None),
        (mutable_globals, "seen = []\ndef f(): seen.append(1)", "zero/a.py:2 changes the global seen"),
        (mutable_globals, "seen = {}\ndef f(): seen[1] = 2", "zero/a.py:2 changes the global seen"),
        (mutable_globals, "state = object()\ndef f(): state.x = 2", "zero/a.py:2 changes the global state"),
        (mutable_globals, "seen = None\ndef f():\n    global seen\n    seen = 1", "zero/a.py:3 writes the global seen"),
        (mutable_globals, "seen = []\ndef f(seen): seen.append(1)", None),
        (mutable_globals, "table = {}\ndef f(): return table[1]", None),
        (vague_docstrings, "def f(): 'It adds.'", "zero/a.py:1 begins with a vague word: It adds."),
        (vague_docstrings, "class A: 'The same as B.'", "zero/a.py:1 begins with a vague word: The same as B."),
        (vague_docstrings, "'Whoever adds.'", None),  # no word of the list
        (vague_docstrings, "def f(): 'Sum of both.'", None),
    ],
)
def test_each_law_of_names_complains_of_offenders_only(
    tmp_path: Path, law: Callable[[Path], Iterator[str]], text: str, complaint: str | None
) -> None:
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "a.py").write_text(text)
    assert list(law(tmp_path)) == ([complaint] if complaint else [])


def test_names_of_tests_are_unique_and_have_3_words() -> None:
    """Plain English of at least three words; what the name does not say, the docstring does."""
    names = Counter(
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def test_(\w+)", file.read_text(), re.M)
    )
    assert len(names) > 1000
    assert [name for name, count in names.items() if count > 1 or len(name) > 60 or name.count("_") < 2] == []
