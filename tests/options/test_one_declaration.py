"""One field in ``options/sections.py`` declares an option everywhere in the library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

FIELD = '    shine: int = option(3, "Shine of the weights.", least=1)\n'
PROGRAM = """
from pathlib import Path
import torch, triax
from typer.testing import CliRunner
from triax.base.errors import ConfigError
from triax.cli.main import app
from triax.options.engine import EngineOptions
from triax.options.table import markdown
from triax.train.file import read_training_file
from triax.train.job import resolve

def refused(function):
    try:
        function()
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was accepted")

make = lambda **keywords: triax.Engine(torch.nn.Linear(2, 1), batch=1, **keywords)
assert make(shine=5).options.shine == 5 and make().options.shine == 3
assert "did you mean 'shine'?" in refused(lambda: make(shien=5))
assert "shine = 0: give 1 or more" in refused(lambda: make(shine=0))
lines = ["model: {preset: bytes-tiny}", "data: tokens", "batch: 1", "training: {steps: 1}", "shine: 4"]
Path("run.yaml").write_text("\\n".join(lines))
read = lambda *changes: resolve(read_training_file("run.yaml", changes)[0]).options.shine
assert read() == 4 and read("shine=6") == 6
assert "did you mean 'shine'?" in refused(lambda: read("shien=6"))
assert "| `shine` | int | `3` | Shine of the weights. |" in markdown(EngineOptions)
assert "| `shine` | int | `3` | Shine of the weights. |" in CliRunner().invoke(app, ["train", "--table"]).stdout
"""


def test_one_declared_field_is_an_option_everywhere(tmp_path: Path) -> None:
    """Keyword of ``triax.Engine``, key of the training file and of the command line, row of both pages, hint."""
    skipped = ("tests", "docs", "benchmarks", ".*", "*.egg-info", "build", "runs", "node_modules")
    shutil.copytree(ROOT, tmp_path / "triax", ignore=shutil.ignore_patterns(*skipped), symlinks=True)
    declaration = tmp_path / "triax" / "options" / "sections.py"
    before, seed, after = declaration.read_text().partition("    seed: int = option(")
    declaration.write_text(before + FIELD + seed + after)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
