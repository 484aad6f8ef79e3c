"""Comparing the tensors of a checkpoint with those of a model: names and shapes, over all ranks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from ..base.errors import CheckpointError
from ..grid import Grid
from .snapshot import BUFFERS, WEIGHTS, Snapshot

Shape = tuple[int, ...]

_MOST = 8  # names that a message lists


def match_model(
    grid: Grid,
    snapshot: Snapshot,
    shapes: Mapping[str, Shape],
    strict: bool,
    other_problems: Sequence[str] = (),
    second_names: Collection[str] = (),
) -> dict[str, Shape]:
    """Return this rank's weights and buffers that the checkpoint contains with equal shapes. Collective.

    Args:
        grid: the model's grid.
        snapshot: read from a checkpoint.
        shapes: name in a checkpoint -> unsharded shape, for each weight and buffer of this rank.
        strict: refuse a checkpoint of another model. If False, rank 0 logs the names that are not loaded.
        other_problems: further reasons of the caller to refuse the checkpoint. They are equal on all ranks.
        second_names: names that the checkpoint may have beside those of ``shapes``: of parameters under another name.

    Raises:
        CheckpointError: on every rank, if ``strict`` is set and names are missing or unexpected or shapes differ.
    """
    tensors = snapshot.tensors
    missing = [name for name in shapes if name not in tensors]
    unlike = {
        name: f"{_short(name)} {tensors[name].shape} in the checkpoint, {shape} in the model"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    }
    gathered = grid.world.all_gather_json(([*shapes], missing, [*unlike.values()]))
    known = {name for names, *_ in gathered for name in names} | {*second_names}
    unexpected = [name for name in tensors if name.partition("/")[0] in (WEIGHTS, BUFFERS) and name not in known]
    mismatches = {
        "missing in the checkpoint": list(dict.fromkeys(_short(name) for _, names, _ in gathered for name in names)),
        "not in the model": [_short(name) for name in unexpected],
        "of another shape": list(dict.fromkeys(text for *_, texts in gathered for text in texts)),
    }
    problems = [f"{title}: {listed(names)}" for title, names in mismatches.items() if names]
    problems += other_problems
    if problems and strict:
        raise CheckpointError(
            f"{snapshot.source} does not fit this model: {'; '.join(problems)}. Build the model that was saved, or "
            "load the tensors that fit with load_checkpoint(..., load_module_strict=False)"
        )
    if problems and grid.rank == 0:
        logging.getLogger("triax").warning("%s: not loaded: %s", snapshot.source, "; ".join(problems))
    return {name: shape for name, shape in shapes.items() if name in tensors and name not in unlike}


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list as text, and how many more there are."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def _short(name: str) -> str:
    return name.removeprefix(f"{WEIGHTS}/")
