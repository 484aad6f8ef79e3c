"""Files of a run's folder: their names, names within them, and writing one atomically."""

from __future__ import annotations

from pathlib import Path

METRICS, RUN, TIMELINE = "metrics.jsonl", "run.json", "timeline.json"
HISTOGRAMS = "histograms.jsonl"
TERMS = "Train/Metrics/"  # in front of the name of a term or metric of the loss
EXPERTS = "Train/Experts/"  # in METRICS, in front of a layer's name: the loads of its experts


def replace_file(file: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part of it."""
    partial = file.with_name(f"{file.name}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
