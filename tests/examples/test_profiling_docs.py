"""The profiling options in docs/monitoring.md: each program is run by a command of the page.

Its first program is run by tests/engine/monitor/test_observer.py.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from support.paths import DOCS
from support.processes import program
from support.readme_blocks import blocks, commands, programs

TEXT = (DOCS / "monitoring.md").read_text().partition("\n## Profiling options\n")[2]
COMMANDS = [command for _, command in commands(TEXT)]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_profiling_options_run(ranks: Any, command: str, tmp_path: Path) -> None:
    launcher, *words = shlex.split(command)
    size = int(words[1]) if launcher == "torchrun" else 1
    assert launcher == "python" or (launcher == "torchrun" and words.pop(0) == "--nproc-per-node" and words.pop(0))
    name = words[0]
    (tmp_path / name).write_text(programs(TEXT)[name])
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


def test_every_program_of_the_profiling_options_is_run() -> None:
    typed = " ".join(COMMANDS)
    assert list(programs(TEXT)) == ["profiled.py", "standalone.py"] and all(name in typed for name in programs(TEXT))
    assert {block.language for block in blocks(TEXT)} <= {"python", "sh", "json"}
