"""docs/data.md: every command in it is run, and every program."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from support.command_line import output_of
from support.paths import DOCS
from support.processes import program
from support.readme_blocks import commands, make_text, programs

TEXT = (DOCS / "data.md").read_text()


def make_sources(folder: Path) -> None:
    (folder / "text").mkdir()
    for number in range(9):
        paragraphs = [f"paragraph {number}, {place}\nof a text\n" * 3 for place in range(9)]
        (folder / "text" / f"{number}.txt").write_text("\n".join(paragraphs))


def run(typed: str) -> str:
    triax, *words = shlex.split(typed)
    assert triax == "triax"
    return output_of(*words)


def typed(*launchers: str) -> list[str]:
    return [command for _, command in commands(TEXT) if command.split()[0] in launchers]


def test_the_commands_of_the_data_page_work(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("tokenizers")
    make_text((DOCS / "train.md").read_text(), tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in typed("triax"):
        if "chat-tokens" not in command:
            assert run(command)


@pytest.mark.exhaustive  # transformers is slow to load
def test_the_commands_for_conversations_work(tmp_path: Path, monkeypatch: Any) -> None:
    make_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    run("triax data train-tokenizer text --vocab-size 300 --output tokenizer")
    exec(programs(TEXT)["make_chat.py"])
    written, shown = (run(each) for each in typed("triax") if "chat-tokens" in each)
    assert "in 20 documents" in written
    assert "<user>What is 0 + 1?<assistant>1.<|endoftext|>" in shown
    assert "3 tokens count in the loss" in shown  # 1, the full stop, and the end


def test_programs_of_the_data_page_print_equal_text_on_every_grid(ranks: Any, tmp_path: Path) -> None:
    make_sources(tmp_path)
    for name, source in programs(TEXT).items():
        (tmp_path / name).write_text(source)
    (alone,) = ranks(1, program, ["train.py"], str(tmp_path))
    assert alone.count("step") == 3
    for words in map(shlex.split, typed("torchrun")):
        assert words[:2] == ["torchrun", "--nproc-per-node"]
        assert ranks(int(words[2]), program, words[3:], str(tmp_path))[0] == alone
    assert '"row": 16' in ranks(1, program, ["loop.py"], str(tmp_path))[0]


def test_every_command_of_the_data_page_is_run() -> None:
    assert list(programs(TEXT)) == ["make_chat.py", "train.py", "loop.py"]
    assert len(typed("triax", "python", "torchrun")) == len(commands(TEXT))
