"""Reader of the fenced code blocks of a Markdown document."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.paths import DOCS
from support.processes import program


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    """The fenced code blocks, in order."""
    found: list[Block] = []
    language, start = "", 0
    held: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"\s*```(\S*)", line)
        if fence and not start:
            language, start, held = fence[1], number, []
        elif fence:
            found.append(Block(language, "\n".join(held) + "\n", start))
            start = 0
        elif start:
            held.append(line)
    assert not start, f"the block that starts in line {start} never ends"
    return found


def block_of(page: str, start: str) -> str:
    """Return the code block of a page of docs/ that starts with a text."""
    return next(block.text for block in blocks((DOCS / page).read_text()) if block.text.startswith(start))


def steps_of_program(source: str, folder: str, engine: str) -> int:
    """Run a program in a folder, and return the steps that its engine of this name has taken."""
    os.chdir(folder)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "program of the docs", "exec"), space)
    return int(space[engine].global_steps)


def programs(text: str) -> dict[str, str]:
    """Name -> source of each Python program."""
    found: dict[str, str] = {}
    for block in blocks(text):
        if block.language not in ("python", "py"):
            continue
        if found and not re.search(r"^\s*(import|from) ", block.text, re.MULTILINE):
            found[list(found)[-1]] += block.text
            continue
        name = re.match(r"# (\w+\.py)\b", block.text)
        found[name[1] if name else f"line_{block.line}.py"] = block.text
    return found


def run_page_program(page: str, folder: str, name: str, sizes: Sequence[object] = ()) -> str:
    """Be a rank of a program of a page of docs; return what it prints."""
    path = Path(folder, str(os.getpid()), name)  # a rank that writes a file while another reads it leaves it nothing
    path.parent.mkdir(exist_ok=True)
    path.write_text(programs((DOCS / page).read_text())[name])
    return program([str(path), *map(str, sizes)], folder)


def commands(text: str) -> list[tuple[int, str]]:
    """(line, command) for every command, without prompts, comments and continuations."""
    found = []
    for block in blocks(text):
        if block.language not in ("sh", "bash", "shell", "console"):
            continue
        joined = re.sub(r"\s*\\\n\s*", " ", block.text)
        lines = [line.strip() for line in joined.splitlines()]
        if block.language == "console":  # what has no prompt is output
            lines = [line for line in lines if line.startswith("$ ")]
        for line in lines:
            command = line.removeprefix("$ ")
            if command and not command.startswith("#"):
                found += [(block.line, part.strip()) for part in re.split(r"&&|;", command)]
    return found


def make_text(page: str, folder: Path) -> None:
    """Run a page's commands that make its folder of text: ``mkdir text``, ``python -m pydoc os > text/os.txt``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    typed = [command for _, command in commands(page) if makes_text(command)]
    assert typed
    for command in typed:
        subprocess.run(["sh", "-c", command], cwd=folder, env={**os.environ, "PATH": path}, timeout=60, check=True)


def makes_text(command: str) -> bool:
    return command.startswith(("mkdir text", "python -m pydoc "))
