"""Picture of the folders by level, from the table of tests/laws/test_imports.py: ``python docs/inside/structure.py``.

It writes structure.svg beside this file. A folder's row is the longest chain of folders that it may import.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))

from import_reader import ARROWS, GROUND  # noqa: E402  # found by the line above

SUBJECTS = {
    "grid": "ranks, groups, layouts",
    "base": "errors, names, values",
    "randomness": "numbers by the seed",
    "agreement": "facts of all ranks",
    "options": "what a user may choose",
    "pipe": "stages and schedules",
    "tensor_parallel": "layers in shards",
    "context": "parts of a sequence",
    "moe": "mixtures of experts",
    "zero": "sharded replicas",
    "optim": "optimizers, rates",
    "data": "tokens, loaders",
    "checkpoint": "files of a run",
    "monitor": "records, traces",
    "launcher": "starting ranks",
    "models": "GPT, Llama, Hugging Face's",
    "plan": "formulas, layouts",
    "engine": "the training loop",
    "inference": "generation",
    "gradient_compression": "fewer bytes",
    "methods": "post-training",
    "testing": "a test kit for users",
    "local_sgd": "replicas that step alone",
    "fault_tolerance": "replicas that come and go",
    "dry_run": "a rank of a thousand",
    "compat": "APIs of other libraries",
    "train": "a run from one file",
    "cli": "the command triax",
}
WIDTH, HEIGHT, GAP = 900, 44, 26
STYLE = """<style>
text { font: 12px sans-serif; text-anchor: middle; fill: #1b1b1b } .name { font: bold 14px monospace }
rect { fill: #e8eef6; stroke: #44608a } path { stroke: #44608a; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #f0f0f0 } rect { fill: #24344c; stroke: #8fb0dd }
  path { stroke: #8fb0dd } }
</style>"""


@cache
def level(folder: str) -> int:
    """Return 0 for a folder that imports no other one, else one more than the highest that it may import."""
    below = {each.partition("/")[0] for each in ARROWS[folder]} - {folder}
    below -= set(GROUND) if folder in GROUND else set()
    return max((1 + level(each) for each in below), default=0)


def draw() -> str:
    """Return the picture as SVG: the lowest level at the bottom, at most five folders in a row."""
    levels: dict[int, list[str]] = {}
    for folder in ARROWS:
        levels.setdefault(level(folder), []).append(folder)
    y, lines = 6, []
    for at in sorted(levels, reverse=True):
        count = -(-len(levels[at]) // 5)  # rows
        for row in range(count):
            folders = levels[at][row::count]
            each = WIDTH / len(folders)
            for i, folder in enumerate(folders):
                middle = (i + 0.5) * each
                lines.append(f'<rect x="{i * each + 4:.0f}" y="{y}" width="{each - 8:.0f}" height="{HEIGHT}" rx="5"/>')
                lines.append(f'<text class="name" x="{middle:.0f}" y="{y + 18}">{folder}/</text>')
                lines.append(f'<text x="{middle:.0f}" y="{y + 36}">{SUBJECTS[folder]}</text>')
            y += HEIGHT + 6
        if at:
            lines.append(f'<path d="M{WIDTH // 2} {y} v{GAP - 8} m-6 -8 l6 8 l6 -8"/>')
            y += GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}">'
    return "\n".join([head, STYLE, *lines, "</svg>\n"])


if __name__ == "__main__":
    (HERE / "structure.svg").write_text(draw())
