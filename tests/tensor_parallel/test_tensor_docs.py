"""The program of docs/tensor-parallel.md prints the same on one rank and on two, as the page shows."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from support.paths import DOCS
from support.processes import program
from support.readme_blocks import blocks, commands, programs

TEXT = (DOCS / "tensor-parallel.md").read_text()


@pytest.mark.parametrize("command", [command for _, command in commands(TEXT)])
def test_the_tensor_parallel_page_shows_what_its_program_prints(ranks: Any, command: str, tmp_path: Path) -> None:
    (tmp_path / "mlp.py").write_text(programs(TEXT)["mlp.py"])
    (shown,) = [block.text for block in blocks(TEXT) if block.language == "text"]
    words = shlex.split(command)
    size = int(words[2]) if words[0] == "torchrun" else 1
    first, *others = ranks(size, program, words[-2:], str(tmp_path))
    assert first == shown and not any(others)
