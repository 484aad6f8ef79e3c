"""Folders of this checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS, EXAMPLES, BENCHMARKS = ROOT / "docs", ROOT / "examples", ROOT / "benchmarks"
