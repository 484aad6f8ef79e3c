"""Docstrings of public names: examples that run, for the names that the pages use most, and every dataclass field."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import io
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax

from support.import_reader import library
from support.paths import DOCS, ROOT

SLOW = ("grid/launcher/launch.py", "pipe/schedules/search.py")  # seconds: processes, and a search
OFTEN = 3  # pages and example files


def with_examples() -> list[Any]:
    files = [file for file in library(ROOT) if ">>> " in (ROOT / file).read_text(encoding="utf-8")]
    return [pytest.param(file, marks=[pytest.mark.exhaustive] if file in SLOW else []) for file in files]


@pytest.mark.parametrize("file", with_examples())
def test_the_examples_in_docstrings_run(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"triax": triax, "torch": torch, "nn": nn, "os": os, "Path": Path}
    if "huggingface" in file:
        names["transformers"] = pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(".".join(["triax", *Path(file).with_suffix("").parts]).removesuffix(".__init__"))
    runner, told = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), io.StringIO()
    for example in doctest.DocTestFinder().find(module, extraglobs=names):
        runner.run(example, out=told.write)
    assert runner.tries and not runner.failures, told.getvalue()


def often_used() -> list[str]:
    """The names of ``triax`` that several pages or example files use."""
    files = [file for folder in (DOCS, ROOT / "examples") for file in folder.rglob("*") if file.is_file()]
    texts = [file.read_text(encoding="utf-8") for file in files if file.suffix in (".md", ".py", ".ipynb")]
    uses = Counter(name for text in texts for name in {*re.findall(r"\btriax\.(\w+)", text)})
    return [name for name in sorted(triax.__all__) if uses[name] >= OFTEN and callable(getattr(triax, name))]


def test_often_used_names_have_an_example() -> None:
    pytest.importorskip("transformers")
    names = often_used()
    assert len(names) > 30
    assert [name for name in names if ">>> " not in (getattr(triax, name).__doc__ or "")] == []


# ------------------------------------------------------------------------------------------------------ fields


def fields_of(kind: type) -> tuple[str, ...]:
    """The public fields of a dataclass or a named tuple, without those of other libraries' base classes."""
    ours = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == kind.__module__.partition(".")[0]]
    if not dataclasses.is_dataclass(kind):
        return getattr(kind, "_fields", ())
    own = {name for base in ours for name in vars(base).get("__annotations__", {})}
    return tuple(each.name for each in dataclasses.fields(kind) if each.name in own and each.name[0] != "_")


def described(kind: type) -> set[str]:
    """The names that docstrings describe under Attributes or Args: of a class, and of its bases."""
    found: set[str] = set()
    for base in kind.__mro__:
        inside = False
        for line in inspect.cleandoc(base.__doc__ or "").splitlines():
            if line and line[0] != " ":
                inside = line.startswith(("Attributes", "Args"))
            elif inside and (entry := re.match(r" {4}(\w[\w, ]*): ", line)):
                found |= {*entry[1].split(", ")}
    return found


def undescribed(kinds: dict[str, type]) -> Iterator[str]:
    for path, kind in kinds.items():
        if missing := [name for name in fields_of(kind) if name not in described(kind)]:
            yield f"{path}: its docstring describes no {', '.join(missing)}: add a line to its Attributes"


def test_every_field_of_a_public_dataclass_is_described() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    listed = (ROOT / "tests" / "laws" / "public_api.txt").read_text(encoding="utf-8")
    paths = [path.rpartition(".") for path in re.findall(r"^class (triax[\w.]+)", listed, re.MULTILINE)]
    kinds = {".".join(path): getattr(importlib.import_module(path[0]), path[2]) for path in paths}
    assert sum(bool(fields_of(kind)) for kind in kinds.values()) > 50
    found = list(undescribed(kinds))
    assert not found, "\n" + "\n".join(found)


def test_a_field_that_is_left_out_is_found() -> None:
    @dataclasses.dataclass
    class Base:
        """Base.

        Args:
            width: 1.
        """

        width: int

    @dataclasses.dataclass
    class Made(Base):
        """Made.

        Attributes, beside those of ``Base``:
            height, depth: 2.
                color: no field.
        """

        height: int
        depth: int
        color: int

    assert list(undescribed({"Made": Made})) == ["Made: its docstring describes no color: add a line to its Attributes"]
