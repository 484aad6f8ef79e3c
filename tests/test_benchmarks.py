"""The benchmark runs on a small size, compares gradients first, and prints what it measured; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_pipeline_benchmark_runs() -> None:
    command = [
        sys.executable,
        "benchmarks/pipeline.py",
        "--stages",
        "2",
        "--stacks",
        "smoke",
        "--rounds",
        "2",
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout[done.stdout.index("{") :])["results"].values()
    text = json.dumps(result)
    for name in ("triax 1f1b", "triax zb-h1", "triax interleaved", "torch Schedule1F1B", "one process"):
        assert name in text
