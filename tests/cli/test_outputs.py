"""Files that commands write: a path that cannot be written is refused before the work begins."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import triax.cli
from triax.base.option_error import OptionError
from triax.cli.main import app
from triax.options.base import Options, declared, hints_of, is_required

MODULES = [importlib.import_module(f"triax.cli.{each.name}") for each in pkgutil.iter_modules(triax.cli.__path__)]
FLAGS = {value for module in MODULES for value in vars(module).values() if inspect.isclass(value)}
OUTPUTS = sorted(
    (
        (kind, each.name)
        for kind in FLAGS
        if issubclass(kind, Options)
        for each in declared(kind)
        if Path in getattr(hints_of(kind)[each.name], "__args__", (hints_of(kind)[each.name],))
    ),
    key=str,
)


def refusal(kind: type[Options], name: str, path: Path) -> str:
    required = {each.name: "x" for each in declared(kind) if is_required(each)}
    with pytest.raises(OptionError) as caught:
        kind(**required, **{name: path})
    return str(caught.value)


@pytest.mark.parametrize(("kind", "name"), OUTPUTS, ids=[f"{kind.__name__}-{name}" for kind, name in OUTPUTS])
def test_each_output_path_is_checked_before_the_work(kind: Any, name: str, tmp_path: Path) -> None:
    ending = next(each for each in declared(kind) if each.name == name).metadata["writes"][0]
    (tmp_path / f"folder{ending}").mkdir()
    (tmp_path / "file").write_text("")
    missing = tmp_path / "a" / "b"
    assert f"type mkdir -p {missing}" in refusal(kind, name, missing / f"x{ending}")
    assert f"{tmp_path / 'file'} is a file, not a folder" in refusal(kind, name, tmp_path / "file" / f"x{ending}")
    assert f"folder{ending} is a folder" in refusal(kind, name, tmp_path / f"folder{ending}")
    if ending:
        assert "x.wrong must end in" in refusal(kind, name, tmp_path / "x.wrong")


@pytest.mark.parametrize(
    "words", [["machine", "measure"], ["schedule", "1f1b", "--plot"], ["checkpoint", "export", "x"]]
)
def test_a_command_names_the_folder_that_is_missing(words: list[str], tmp_path: Path) -> None:
    ending = {"machine": "json", "schedule": "png", "checkpoint": "safetensors"}[words[0]]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "none" / f"x.{ending}")])
    assert done.exit_code and f"mkdir -p {tmp_path / 'none'}" in done.output + str(done.exception)
