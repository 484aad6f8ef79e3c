"""Recomputation by an op of the schedule: a stage's pass keeps its inputs, and C runs it again before the backward.

The stage is one recomputed group (recompute.py): gradients go through the graph of the first run, and the second run
makes the saved tensors of that graph anew. Only the time of the second run differs: the schedule sets it, for instance
while the rank waits for a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ...grid import Grid
from ...grid.randomness.random import DropoutState
from .frame import Frame, State
from .kept_inputs import Inputs, KeptNest


def run_to_recompute(
    grid: Grid,
    dropout: DropoutState,
    name: str,
    parts: Sequence[nn.Module],
    function: Callable[[Any], Any],
    value: Any,
    compares: bool,
) -> tuple[Any, Callable[[], None]]:
    """Run a function and keep only its input for the backward pass.

    Args:
        grid: grid whose device tells which random generators the second run gets back.
        dropout: the keys of dropout.
        name: name of what runs, for messages.
        parts: modules whose state the second run gets back.
        function: what to run.
        value: its argument, a nest of tensors.
        compares: compare the values of both runs.

    Returns:
        (result, function that runs it again; without that call the backward pass does).
    """
    inputs = KeptNest(Inputs(grid), name, ((value,), {}), None)
    state = State(grid, dropout, True, parts)

    def run_again() -> None:
        with state.restored():
            repeated, _ = inputs.restore()
            function(*repeated)

    frame = Frame(run_again, name, compares=compares)
    with frame.hooks():
        result = function(value)
    state.keep_changed()
    inputs.run_ended()
    return result, frame.begin
