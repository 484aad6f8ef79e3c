"""Names and commands of triax in messages, docstrings, comments and pages exist."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from triax.cli.main import app
from triax.cli.verbs import VerbGroup
from triax.compat.launcher_options import IDLE, REPLACED, SAME

from support.import_reader import library
from support.paths import ROOT
from support.readme_blocks import commands

_NAME = re.compile(r"(?<![\w./-])triax((?:\.[A-Za-z_]\w*)+)")
_COMMAND = re.compile(r"`triax((?: +[^\s`]+)*)`?")  # in a sentence
_IMPORT = re.compile(r"from triax((?:\.\w+)*) import (\([^)]*\)|[\w, ]+)")
_FILES = (".json", ".yaml", ".toml", ".png")  # triax.schema.json is a file


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """Each file of the library and each page: its name, and its text."""
    patterns = ["*.md", "docs/**/*.md", "docs/**/*.ipynb", "examples/**/*.py", "examples/**/*.[mysj]*"]
    patterns += ["benchmarks/**/*.py", "**/__init__.pyi"]
    pages = [
        page for pattern in patterns for page in root.glob(pattern) if page.is_file() and ".venv" not in page.parts
    ]
    for file in [*(root / name for name in library(root)), *pages]:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        yield str(file.relative_to(root)), text


def _exists(name: str) -> bool:
    """Return True if a dotted name of triax is an attribute, or a module."""
    found: Any = importlib.import_module("triax")
    path = "triax"
    for part in name.split("."):
        path += f".{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
    return True


def missing_names(root: Path) -> Iterator[str]:
    everything = list(texts(root))
    groups = {
        name for _, text in everything for name in re.findall(r'^_\w+ = "triax\.(\w+)"  # .*entry points', text, re.M)
    }
    known: dict[str, bool] = {}
    for file, text in everything:
        for place, name in _names(text):
            if name not in known:
                known[name] = name in groups or name.endswith(_FILES) or _exists(name)
            if not known[name]:
                yield f"{file}:{text.count(chr(10), 0, place) + 1} names triax.{name}, which does not exist"


def _names(text: str) -> Iterator[tuple[int, str]]:
    """Yield the dotted names of a text, and those that it imports, each with its place."""
    for match in _NAME.finditer(text):
        yield match.start(), match[1][1:]
    for match in _IMPORT.finditer(text):
        for name in re.findall(r"\w+", re.sub(r"\bas \w+|#.*", "", match[2])):
            yield match.start(), f"{match[1]}.{name}"[1:]


def _commands(file: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the commands in backticks, and those of a page's shell blocks: the line, and the words behind triax."""
    for match in _COMMAND.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[1].split()
    for line, command in commands(text) if file.endswith(".md") else ():
        for part in re.findall(r"(?:^|[|;&] *|--no-python )triax +([^|;&#]*)", command):
            yield line, part.split()


def missing_commands(root: Path) -> Iterator[str]:
    """Yield the places that name a command, a subcommand or an option that the command line does not have."""
    top: Any = get_command(app)
    for file, text in texts(root):
        for line, given in _commands(file, text):
            command, words, place = top, list(given), f"{file}:{line} names triax {' '.join(given)}"
            while words and hasattr(command, "commands") and words[0] in command.commands:
                command = command.commands[words.pop(0)]
            if isinstance(command, VerbGroup) and words:
                command = command.first
            if words and hasattr(command, "commands") and re.fullmatch(r"[a-z][\w-]*", words[0]):
                yield f"{place}, and there is no {words[0]}"
                continue
            options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
            if command.name == "run":  # it takes other launchers' options, and behind the script they are the script's
                options |= {*IDLE, *REPLACED, *(other for others in SAME.values() for other in others)}
                words = words[: next((at for at, word in enumerate(words) if "." in word and word[0] != "-"), 0)]
            for word in words:
                option = word.partition("=")[0].replace("_", "-")
                if option.startswith("--") and option not in (*options, "--help"):
                    yield f"{place}, which has no {option}"


def test_every_name_in_the_docs_exists() -> None:
    found = list(missing_names(ROOT))
    assert not found, "\n" + "\n".join(found)


def test_every_command_in_the_docs_exists() -> None:
    found = list(missing_commands(ROOT))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("law", "text", "complaint"),
    [
        (missing_names, "# as triax.GPTLoss does", "names triax.GPTLoss"),
        (missing_names, '"""Call triax.models.huggingface.hf_layers."""', "triax.models.huggingface.hf_layers"),
        (missing_names, '"from triax.grid import Grid, Gird"', "names triax.grid.Gird"),
        (
            missing_names,
            "# as triax.compat.deepspeed.config.load_json does",
            "names triax.compat.deepspeed.config.load_json",
        ),
        (missing_names, "# as triax.NextTokenLoss and triax.models.gpt.GPTLoss do, in triax.schema.json", None),
        (missing_commands, '"""Call `triax grids`."""', "there is no grids"),
        (missing_commands, '"""Call `triax checkpoint shows x`."""', "there is no shows"),
        (missing_commands, '"""Call `triax grid --pipes 2`."""', "has no --pipes"),
        (missing_commands, '"""Call `triax run --num_gpus 2 --nprocs 2 x.py --mine`."""', "has no --nprocs"),
        (missing_commands, '"""Call `triax grid --pipe 2`, `triax run x.py --mine` or `triax --version`."""', None),
    ],
)
def test_each_law_of_references_complains_of_offenders_only(
    tmp_path: Path, law: Callable[[Path], Iterator[str]], text: str, complaint: str | None
) -> None:
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "a.py").write_text(text)
    found = list(law(tmp_path))
    assert [str(complaint) in line for line in found] == ([] if complaint is None else [True]), found
