"""State of a step in a plain training loop: how far its backward passes and the reductions of its gradients are."""

from __future__ import annotations

from enum import Enum, auto


class StepState(Enum):
    """State of the backward passes of one step, and of the reductions of its gradients.

    A step of ``BackwardPasses`` has a known number of passes, or its caller tells the last one (``next_is_last()``).

    state        the step
    OPEN         its last backward pass has not begun
    LAST_BEGAN   its last backward pass runs, or has ended; its gradients are reduced meanwhile
    REOPENED     a further pass has reached the outputs or the loss, and has no gradient yet
    REDUCED      all its gradients are reduced
    STEPPED      the optimizer has stepped with them

    from         to           when
    OPEN         LAST_BEGAN   the last pass is counted: at its first gradient, or without one by ``run_empty``
    LAST_BEGAN   REOPENED     a further pass begins, and the caller tells the last one, so that there may be several
    LAST_BEGAN   REDUCED      ``end_reductions``, which first counts the passes that are missing on this replica
    REOPENED     LAST_BEGAN   this pass is counted
    REOPENED     REDUCED      ``end_reductions``: this pass had no gradient
    REDUCED      REOPENED     a further pass begins, as above
    REDUCED      STEPPED      ``mark_stepped``
    LAST_BEGAN   OPEN         ``reset``: the last pass has failed half way
    REDUCED      OPEN         ``reset``, which first ends the reductions in all other cases: gradients are discarded
    STEPPED      OPEN         ``begin`` or ``reset``: the next step begins
    """

    OPEN = auto()
    LAST_BEGAN = auto()
    REOPENED = auto()
    REDUCED = auto()
    STEPPED = auto()


OPEN, LAST_BEGAN, REOPENED, REDUCED, STEPPED = StepState
