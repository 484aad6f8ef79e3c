"""Picture of the rooms by level, from the table of tests/support/import_reader.py: ``python docs/inside/structure.py``.

It writes structure.svg beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from support.import_reader import LEVELS  # noqa: E402  # found by the line above

SUBJECTS = {
    "base": "errors, names, values, files",
    "options": "what a user may choose",
    "grid": "ranks, groups, agreement, starting",
    "pipe": "stages in time",
    "tensor_parallel": "layers in shards",
    "context": "parts of a sequence",
    "zero": "sharded replicas",
    "checkpoint": "files of a run",
    "data": "tokens, loaders",
    "moe": "mixtures of experts",
    "models": "GPT, Llama, Hugging Face's",
    "engine": "the step, optimizers, records",
    "inference": "generation",
    "testing": "a test kit for users",
    "train": "a run from one file, post-training",
    "plugins": "plan, dry run, replicas",
    "compat": "APIs of other libraries",
    "cli": "the command triax",
}
WIDTH, HEIGHT, GAP = 1100, 44, 26
STYLE = """<style>
text { font: 12px sans-serif; text-anchor: middle; fill: #1b1b1b } .name { font: bold 14px monospace }
rect { fill: #e8eef6; stroke: #44608a } path { stroke: #44608a; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #f0f0f0 } rect { fill: #24344c; stroke: #8fb0dd }
  path { stroke: #8fb0dd } }
</style>"""


def draw() -> str:
    """Return the picture as SVG: the lowest level at the bottom."""
    y, lines = 6, []
    for level in reversed(range(len(LEVELS))):
        rooms = LEVELS[level]
        each = WIDTH / len(rooms)
        for i, room in enumerate(rooms):
            middle = (i + 0.5) * each
            lines.append(f'<rect x="{i * each + 4:.0f}" y="{y}" width="{each - 8:.0f}" height="{HEIGHT}" rx="5"/>')
            lines.append(f'<text class="name" x="{middle:.0f}" y="{y + 18}">{room}/</text>')
            lines.append(f'<text x="{middle:.0f}" y="{y + 36}">{SUBJECTS[room]}</text>')
        y += HEIGHT + 6
        if level:
            lines.append(f'<path d="M{WIDTH // 2} {y} v{GAP - 8} m-6 -8 l6 8 l6 -8"/>')
            y += GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}">'
    return "\n".join([head, STYLE, *lines, "</svg>\n"])


if __name__ == "__main__":
    (HERE / "structure.svg").write_text(draw())
