"""docs/data.md: every command in it is run, and every program."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from triax.cli.main import app

from paths import DOCS
from processes import program
from readme_blocks import commands, make_text, makes_text, programs

TEXT = (DOCS / "data.md").read_text()
CHAT = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|endoftext|>"
CHAT += "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"


def make_sources(folder: Path) -> None:
    (folder / "text").mkdir()
    for number in range(9):
        paragraphs = [f"paragraph {number}, {place}\nof a text\n" * 3 for place in range(9)]
        (folder / "text" / f"{number}.txt").write_text("\n".join(paragraphs))
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because"}]
    (folder / "conversations.jsonl").write_text(json.dumps({"messages": turns}) + "\n")


def run(typed: str) -> str:
    words = shlex.split(typed)
    assert words.pop(0) == "triax"
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, f"{typed}: {done.output}"
    return done.output


def typed(*launchers: str) -> list[str]:
    return [command for _, command in commands(TEXT) if command.split()[0] in launchers]


def test_commands_work(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("tokenizers")
    make_text(TEXT, tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in typed("triax"):
        if "--chat" not in command:
            assert run(command)


@pytest.mark.exhaustive  # transformers is slow to load
def test_the_command_for_conversations_works(tmp_path: Path, monkeypatch: Any) -> None:
    make_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    run("triax data train-tokenizer text --vocab-size 300 --out chat-tokenizer")
    config = json.loads(Path("chat-tokenizer/tokenizer_config.json").read_text())
    Path("chat-tokenizer/tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT}))
    (command,) = (each for each in typed("triax") if "--chat" in each)
    assert "in 1 documents" in run(command)
    assert "because<|endoftext|>" in run("triax data show chat-tokens --document 0")


def test_programs_print_the_same_on_every_grid(ranks: Any, tmp_path: Path) -> None:
    make_sources(tmp_path)
    for name, source in programs(TEXT).items():
        (tmp_path / name).write_text(source)
    (alone,) = ranks(1, program, ["train.py"], str(tmp_path))
    assert alone.count("step") == 3
    for words in map(shlex.split, typed("torchrun")):
        assert words[:2] == ["torchrun", "--nproc-per-node"]
        assert ranks(int(words[2]), program, words[3:], str(tmp_path))[0] == alone
    assert '"row": 16' in ranks(1, program, ["loop.py"], str(tmp_path))[0]


def test_all_of_it_is_run() -> None:
    assert list(programs(TEXT)) == ["train.py", "loop.py"]
    shells = [command for _, command in commands(TEXT) if makes_text(command)]
    assert len(typed("triax", "python", "torchrun", "mkdir")) == len(commands(TEXT)) and len(shells) == 3
