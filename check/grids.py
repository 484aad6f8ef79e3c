"""Grids to try: one axis at a time, so that a difference names its axis, then a combination."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..base.errors import ConfigError

AXES = ("pipe", "data", "context", "tensor", "expert")
Axes = tuple[tuple[str, int], ...]


def parse_grid(text: str) -> Axes:
    """Return the axes of ``pipe=2,tensor=2``.

    Raises:
        ConfigError: an unknown axis, or a size that is no number of at least 1.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if name not in AXES or not equals or not size.isdecimal() or int(size) < 1:
            raise ConfigError(f"--grid {text} has {part.strip()!r}: write AXIS=SIZE of {', '.join(AXES)}, as pipe=2.")
        found[name] = int(size)
    if "expert" in found and found.get("data", 1) * found.get("context", 1) % found["expert"]:
        raise ConfigError(f"--grid {text}: expert must divide data x context. Write data={found['expert']} too.")
    return tuple((name, size) for name, size in found.items() if size > 1)


def count(axes: Axes) -> int:
    """Return the number of ranks of a grid. Experts lie on the ranks of data and context."""
    return math.prod(size for name, size in axes if name != "expert")


def name_of(axes: Axes) -> str:
    """Return a grid's name, such as ``pipe=2,tensor=2``."""
    return ",".join(f"{name}={size}" for name, size in axes) or "one process"


def default_grids(ranks: int, layers: int, microbatches: int, experts: bool) -> list[Axes]:
    """Return a grid for each axis, of size 2, and the largest combination of them within some ranks.

    Args:
        ranks: ranks that a grid may have.
        layers: layers of the model; a pipeline has at least one for each stage.
        microbatches: microbatches of the batch, which the replicas share evenly.
        experts: the model has experts.
    """
    possible = {"pipe": layers >= 2, "data": microbatches % 2 == 0, "tensor": True, "context": True}
    grids: list[Axes] = [((axis, 2),) for axis, fits in possible.items() if fits and ranks >= 2]
    if experts and possible["data"] and ranks >= 2:
        grids.append((("data", 2), ("expert", 2)))
    order: Sequence[str] = [axis for axis in ("pipe", "tensor", "data", "context") if possible[axis]]
    together = order[: int(math.log2(max(1, ranks)))]
    if len(together) > 1:
        grids.append(tuple((axis, 2) for axis in together))
    return grids


def parts_of(axes: Axes) -> list[Axes]:
    """Return the grids of one axis each whose combination is this grid; an expert axis keeps what it lies on."""
    single: list[Axes] = []
    for name, size in axes:
        single.append((("data", size), ("expert", size)) if name == "expert" else ((name, size),))
    return single
