"""StepObserver: base class of observers of an engine's steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..grid import Grid


class StepObserver:
    """Observer of the steps of an engine: an element of ``engine.observers``, which each step calls in its text.

    It decides whether a step is taken; what only measures a step reads ``engine.spans``. Every rank has the same
    observers in the same order, so they may communicate.
    """

    def before_step(self) -> None:
        """Called when a step begins."""

    def joined(self, client_state: Mapping[str, Any]) -> None:
        """Called when this replica has got the state of a peer (``fault_tolerance``), before ``may_step``.

        Args:
            client_state: ``engine.client_state`` of the peer.
        """

    def may_step(self, loss: float | None, norm: float | None) -> bool:
        """Return False to leave the step out. Called before the weights change. Every rank returns the same.

        Args:
            loss: the mean loss of the batch. None if the engine was not given a loss.
            norm: the norm of the gradient before clipping. None if it was not computed, or overflowed in fp16.
        """
        return True

    def after_step(self, grid: Grid, loss: Tensor) -> None:
        """Called when a step ends.

        Args:
            grid: the grid whose ranks took the step.
            loss: the loss of the step.
        """

    def may_save(self) -> bool:
        """Return False to save no automatic checkpoint after the step that just ended."""
        return True
