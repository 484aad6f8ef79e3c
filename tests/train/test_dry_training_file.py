"""`triax train FILE --dry`: a training file without its data, on a cluster that is not here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILE = """
model: {preset: llama-tiny, overrides: {num_hidden_layers: 4}}
data: {training: no-such-tokens}
grid: {pipe: 2, data: 4, tensor: 2}
training: {steps: 4, batch: 32, microbatch: 2, sequence: 64, precision: bf16}
"""


@pytest.mark.exhaustive
def test_a_training_file_is_tried_out_without_its_data(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    words = [sys.executable, "-m", "triax.cli.main", "train", str(file), "--dry"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dry run of 16 ranks: pipe 2 x data 4 x tensor 2" in done.stdout
    assert "a step has 4 microbatches, of which 2 were run" in done.stdout
    assert "nothing would have failed" in done.stdout
    assert not (tmp_path / "runs").exists()
