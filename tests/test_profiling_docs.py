"""docs/profiling.md and docs/autocast.md: every program and command in them is run."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_readme import ROOT, blocks, broken_links, check, commands, programs, write_programs

DOCS = [ROOT / "docs" / "profiling.md", ROOT / "docs" / "autocast.md"]
COMMANDS = [(doc, command) for doc in DOCS for _, command in commands(doc.read_text())]


@pytest.mark.parametrize(("doc", "command"), COMMANDS, ids=[f"{doc.stem}: {command}" for doc, command in COMMANDS])
def test_commands_run(doc: Path, command: str, tmp_path: Path) -> None:
    write_programs(doc.read_text(), tmp_path)
    check(command, tmp_path)
    if "profiled.py" in command:
        assert "fwd flops of model" in (tmp_path / "flops.txt").read_text()


def test_every_program_is_run_by_a_command() -> None:
    for doc in DOCS:
        typed = " ".join(command for at, command in COMMANDS if at == doc)
        assert programs(doc.read_text()) and all(name in typed for name in programs(doc.read_text()))
        assert {block.language for block in blocks(doc.read_text())} <= {"python", "sh", "json"}
        assert broken_links(doc.read_text()) == []
