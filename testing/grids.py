"""Few compositions of grid, schedule and ZeRO stage in which every two choices meet once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..pipe.schedules.registry import RECIPES
from .covering import covering_array

AXES = ("pipe", "data", "context", "tensor")


@dataclass(frozen=True)
class Composition:
    """Grid, schedule and ZeRO stage of one run.

    Attributes:
        axes: (name, size) of each axis of the grid, for ``triax.Grid``.
        schedule: name of the schedule.
        stage: stage of ZeRO.
    """

    axes: tuple[tuple[str, int], ...] = ()
    schedule: str = "1f1b"
    stage: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks; experts lie on the ranks of other axes."""
        return math.prod(size for name, size in self.axes if name != "expert")

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes if size > 1)
        return f"Grid({axes}), schedule {self.schedule}, ZeRO stage {self.stage}"


def covering_grids(
    ranks: int = 4,
    axes: Sequence[str] = ("pipe", "data", "tensor"),
    schedules: Sequence[str] = ("1f1b", "interleaved", "zb-h1", "zb-v"),
    stages: Sequence[int] = (0, 1, 2, 3),
    layers: int = 8,
    microbatches: int = 8,
    strength: int = 2,
) -> list[Composition]:
    """Return compositions in which every possible combination of ``strength`` choices occurs.

    Args:
        ranks: number of ranks that a grid may have, at most.
        axes: axes of the grids, of ``pipe``, ``data``, ``context`` and ``tensor``; each has a power of 2 as its size.
        schedules: names of schedules. Without a pipe axis it is the first one.
        stages: stages of ZeRO.
        layers: layers of the model: it has at least one for each stage of the pipeline.
        microbatches: microbatches of a batch. The size of the data axis divides it.
        strength: 2 for all pairs of choices, 3 for all triples.

    Raises:
        ValueError: an unknown axis or schedule, or sizes that no grid has.
    """
    if unknown := [name for name in axes if name not in AXES]:
        raise ValueError(f"there is no axis {unknown[0]!r}: give some of {', '.join(AXES)}")
    if unknown := [name for name in schedules if name not in RECIPES]:
        raise ValueError(f"there is no schedule {unknown[0]!r}: give some of {', '.join(RECIPES)}")
    if ranks < 1 or not schedules or not stages:
        raise ValueError(f"ranks={ranks}, schedules={schedules}, stages={stages}: give at least one of each")
    sizes = [2**k for k in range(ranks.bit_length()) if 2**k <= ranks]

    def allowed(row: dict[str, Any]) -> bool:
        if math.prod(row.get(axis, 1) for axis in axes) > ranks:
            return False
        pipe, data, name = row.get("pipe", 1), row.get("data", 1), row.get("schedule", schedules[0])
        recipe = RECIPES[name]
        if microbatches % data or ("schedule" in row and "pipe" in row and pipe == 1 and name != schedules[0]):
            return False
        return pipe * recipe.chunks <= layers and microbatches // data >= recipe.least(pipe)

    factors = {**dict.fromkeys(axes, sizes), "schedule": tuple(schedules), "stage": tuple(stages)}
    rows = covering_array(factors, allowed, strength=strength)
    if not rows:
        raise ValueError(
            f"no grid of at most {ranks} ranks runs a model of {layers} layers with {microbatches} microbatches in "
            f"{', '.join(schedules)}: give more layers or microbatches"
        )
    return [Composition(tuple((axis, row[axis]) for axis in axes), row["schedule"], row["stage"]) for row in rows]
