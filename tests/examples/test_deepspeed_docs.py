"""docs/deepspeed.md: the programs run, and the keys exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.table import key_of, keys
from triax.compat.deepspeed.configuration import read_deepspeed_config
from triax.compat.deepspeed.from_config import read_config

from support.command_line import output_of
from support.paths import DOCS
from support.readme_blocks import programs

TEXT = (DOCS / "deepspeed.md").read_text()


def test_triax_config_checks_the_deepspeed_configuration(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps({"train_batch_size": 2}))
    assert json.loads(output_of("compat", "config", tmp_path / "ds_config.json"))["train_batch_size"] == 2


def test_deepspeed_docs_map_each_key_to_its_option() -> None:
    table = TEXT.partition("| key | option of `triax.Engine` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.+) \| `(.+)` \|$", table, re.MULTILINE)
    assert len(rows) >= 12
    for key, option in rows:
        assert key_of(option) == key.replace("`", "")


@pytest.mark.parametrize(
    ("given", "lenient", "strict"),
    [
        ({"something_else": 1}, True, False),
        ({"train_batch_sise": 1}, False, False),
        ({"stage3_param_persistence_threshold": 0}, False, False),
        ({"zero_optimization": {"something_else": 1}}, False, False),
        ({"_note": 1}, True, True),
    ],
)
def test_unknown_keys_are_errors_where_the_docs_say(given: dict[str, Any], lenient: bool, strict: bool) -> None:
    for read, works in ((read_deepspeed_config, lenient), (read_config, strict)):
        with nullcontext() if works else pytest.raises(ConfigError):
            read({"train_batch_size": 2, **given})


def test_keys_listed_as_triax_only_exist() -> None:
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
def test_the_programs_of_the_deepspeed_page_run(tmp_path: Path) -> None:
    for name, source in programs(TEXT).items():
        (tmp_path / name).write_text(source)
        done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert name != "under_its_name.py" or done.stdout.split()[:2] == ["0.19.8", "0.19.8"]
