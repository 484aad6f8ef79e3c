"""Lessons of other libraries about installing, configurations and grids: each test cites its number."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from triax import Grid
from triax.base.errors import ConfigError
from triax.compat.deepspeed.from_config import read_config

from support.paths import ROOT


def two_grids() -> Any:
    pipe, data = Grid(pipe=2, data=2, timeout=60), Grid(pipe=1, data=4, timeout=60)
    sums = []
    for axis in (pipe.pipe, pipe.data, data.data):
        sums.append(x := torch.tensor([2.0**pipe.rank]))
        axis.all_reduce(x)
    pipe.close()
    with pytest.raises(RuntimeError, match="the pipe axis's process group is closed"):
        pipe.pipe.all_reduce(torch.ones(1))
    return [int(x) for x in sums]


def test_11_two_grids_of_one_program_have_separate_groups(ranks: Any) -> None:
    """In Megatron-LM a global group could be another grid's, and nothing raised."""
    found = ranks(4, two_grids)
    assert found == [[1 + 4, 1 + 2, 15], [2 + 8, 1 + 2, 15], [1 + 4, 4 + 8, 15], [2 + 8, 4 + 8, 15]]


def test_12_installing_needs_no_compiler() -> None:
    """Megatron-LM could not be installed without a compiler and extra kernel packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert all(re.match(r"setuptools\b", need) for need in project["build-system"]["requires"])
    assert "ext-modules" not in project["tool"]["setuptools"] and not (ROOT / "setup.py").exists()
    needs = {re.match(r"[\w-]+", need)[0] for need in project["project"]["dependencies"]}  # type: ignore[index]
    # all of these have wheels
    wheels = {"torch", "numpy", "einops", "jinja2", "pydantic", "PyYAML", "safetensors", "typer", "rich"}
    assert needs == wheels
    for package in project["tool"]["setuptools"]["packages"]:
        placed = project["tool"]["setuptools"]["package-dir"].get(package)
        folder = ROOT / placed if placed else ROOT.joinpath(*package.split(".")[1:])
        assert not [file for file in folder.iterdir() if file.suffix in (".c", ".cc", ".cpp", ".cu", ".pyx")]


@pytest.mark.parametrize("section", [(), ("optimizer",), ("zero_optimization",), ("pipeline",)])
def test_24_unknown_keys_are_refused(section: tuple[str, ...]) -> None:
    """DeepSpeed took a misspelt key of its configuration without a word."""
    config: dict[str, Any] = {"train_batch_size": 4}
    inner = config
    for name in section:
        inner[name] = {"type": "SGD"} if name == "optimizer" else {}
        inner = inner[name]
    read_config(config)
    inner["no_such_key"] = 1
    with pytest.raises(ConfigError, match="there is no 'no_such_key'"):
        read_config(config)


FIRST_STEP = """
import json, sys
import torch
seen = []
WATCHED = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "ctypes.dlopen")
sys.addaudithook(lambda event, args: seen.append([event, repr(args)[:200]]) if event.startswith(WATCHED) else None)
import triax
from torch import nn
layers = [triax.LayerSpec(nn.Linear, 4, 4), triax.LayerSpec(nn.Linear, 4, 4)]
model = triax.PipelineModule(layers, loss_fn=lambda out, labels: (out - labels).square().mean())
config = {"train_batch_size": 4, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
engine, *_ = triax.initialize(model=model, config=config)
x = torch.randn(4, 4)
engine.train_batch(iter([(x, x)]))
print(json.dumps(seen))
"""


def test_25_nothing_is_compiled_at_import_or_first_use(tmp_path: Path) -> None:
    """DeepSpeed compiles an operator at first use, for about a minute; interrupted, it leaves a lock that hangs."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STEP], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert list(tmp_path.iterdir()) == []
