"""docs/deepspeed.md: its table is the ledger's, its programs run, its commands and keys are there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from triax.cli.main import app
from triax.compat.deepspeed.config.resolved import keys
from triax.compat.deepspeed.ledger import markdown
from triax.compat.launcher_options import IDLE, REPLACED, SAME

from paths import DOCS
from readme_blocks import broken_links, commands, programs

TEXT = (DOCS / "deepspeed.md").read_text()


def test_the_table_is_the_ledgers() -> None:
    assert TEXT.endswith(f"\n{markdown()}\n"), "write the table again: the page says by which command"


def test_commands_have_these_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = [command.split() for _, command in commands(TEXT)]
    typed += [line.split() for line in re.findall(r"^triax run .*", TEXT, re.MULTILINE)]
    assert len(typed) >= 7 and all(words[0] == "triax" for words in typed)
    for words in typed:
        stop = next((at for at, word in enumerate(words) if word == "triax.compat.deepspeed"), len(words))
        names = words[1:2] + [word for word in words[2:3] if words[1] == "checkpoint"]
        command = get_command(app)
        for name in names:
            command = command.commands[name]  # type: ignore[attr-defined]  # a group
        known = {option for parameter in command.params for option in parameter.opts}
        if names == ["run"]:
            known.update(REPLACED, IDLE, *SAME.values())  # names of other launchers
        for option in (word for word in words[:stop] if word.startswith("--")):
            assert option.replace("_", "-") in known, f"triax {' '.join(names)} has no {option}"
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps({"train_batch_size": 2}))
    assert CliRunner().invoke(app, ["config", "ds_config.json"]).exit_code == 0


def test_keys_that_only_triax_has_are_keys() -> None:
    known = {key for key, _ in keys()}
    sections = TEXT.partition("| section | keys |")[2].partition("## Names")[0]
    found = 0
    for names, listed in re.findall(r"^\| (.+?) \| (.+?) \|$", sections, re.MULTILINE):
        if set(names) == {"-"}:
            continue
        for section in [""] if names == "(top)" else re.findall(r"`(\w+)`", names):
            for key in ["" if listed == "all" else key for key in re.findall(r"`(\w+)`", listed) or [""]]:
                path = ".".join(part for part in (section, key) if part)
                assert any(each == path or each.startswith(f"{path}.") for each in known), path
                found += 1
    assert found >= 20


@pytest.mark.exhaustive  # a process of its own: it changes what `import deepspeed` means
def test_programs_run(tmp_path: Path) -> None:
    for name, source in programs(TEXT).items():
        (tmp_path / name).write_text(source)
        done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert name != "under_its_name.py" or done.stdout.split()[:2] == ["0.19.8", "0.19.8"]


def test_links_lead_somewhere() -> None:
    assert broken_links(TEXT, DOCS) == []
