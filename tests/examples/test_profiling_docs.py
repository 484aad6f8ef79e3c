"""docs/profiling.md and docs/autocast.md: every command in them is run, and every program by one of these."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT
from support.processes import program
from support.readme_blocks import blocks, commands, programs

DOCS = [ROOT / "docs" / "profiling.md", ROOT / "docs" / "autocast.md"]
COMMANDS = [(doc, command) for doc in DOCS for _, command in commands(doc.read_text())]


@pytest.mark.parametrize(("doc", "command"), COMMANDS, ids=[f"{doc.stem}: {command}" for doc, command in COMMANDS])
def test_the_commands_of_the_profiling_pages_run(ranks: Any, doc: Path, command: str, tmp_path: Path) -> None:
    launcher, *words = shlex.split(command)
    size = int(words[1]) if launcher == "torchrun" else 1
    assert launcher == "python" or (launcher == "torchrun" and words.pop(0) == "--nproc-per-node" and words.pop(0))
    name = words[0]
    (tmp_path / name).write_text(programs(doc.read_text())[name])
    first, *others = ranks(size, program, words, str(tmp_path))
    assert not any(others)  # rank 0 speaks for all
    if name == "profiled.py":
        assert "fwd flops of model" in (tmp_path / "flops.txt").read_text()
        assert sorted(file.name for file in (tmp_path / "traces").iterdir()) == [
            f"rank-{rank}.pt.trace.json" for rank in range(size)
        ]
        assert first.count("memory at step") == 4 and '"bytes_held"' in first
        assert ("all_reduce over world" in first) == (size > 1)
    elif name == "standalone.py":
        assert "fwd MACs:" in first


def test_every_program_of_the_profiling_docs_is_run() -> None:
    for doc in DOCS:
        typed = " ".join(command for at, command in COMMANDS if at == doc)
        assert programs(doc.read_text()) and all(name in typed for name in programs(doc.read_text()))
        assert {block.language for block in blocks(doc.read_text())} <= {"python", "sh", "json"}
