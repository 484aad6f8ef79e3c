"""Names and colors of the kinds of ops, in every picture."""

from __future__ import annotations

from .ops import Op

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "C": "recompute",
    "O": "offload",
    "R": "reload",
}
# kind -> (color of the first chunk, of the last one), dark enough for white letters
COLORS = {
    "F": ("#1f5fa8", "#7fb2e5"),
    "B": ("#1d7a3f", "#7cc492"),
    "I": ("#b3541e", "#e8a36f"),
    "W": ("#6d6875", "#b5adbd"),
    "C": ("#00707a", "#6fbcc4"),
    "O": ("#8a1c7c", "#d08bc8"),
    "R": ("#b8860b", "#ecc766"),
}
OTHER = "#d9d9d9"


def color(op: Op, stages: int, ranks: int) -> str:
    """Return the color of an op: by kind, lighter for a rank's later chunks."""
    if op.kind not in COLORS:
        return OTHER
    dark, light = COLORS[op.kind]
    chunks = max(1, stages // ranks)
    share = (op.stage // ranks) / max(1, chunks - 1) if chunks > 1 else 0.0
    mix = (round(int(dark[i : i + 2], 16) * (1 - share) + int(light[i : i + 2], 16) * share) for i in (1, 3, 5))
    return "#" + "".join(f"{x:02x}" for x in mix)
