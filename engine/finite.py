"""What is done about a loss, or a gradient, that is nan or infinite: ``nan_loss`` in the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..grid import Grid
from .batch import AgreedError

Policy = Literal["raise", "skip", "ignore"]


class Finite:
    """Looks at a step's loss and gradients before the weights move. Every rank decides alike, from the same sums.

    Under fp16 gradients overflow in the ordinary course of things, and the loss scale answers that; the loss itself is
    not scaled, so it is looked at all the same.

    Args:
        grid: of the engine.
        policy: ``raise``, ``skip`` the step, or ``ignore``: weights take what comes.
        scaled: whether a loss scale looks after the gradients.

    Attributes:
        skipped: the number of steps left out.
    """

    def __init__(self, grid: Grid, policy: Policy, scaled: bool) -> None:
        self._grid, self._policy, self._scaled = grid, policy, scaled
        self.skipped = 0

    def leaves_out(self, loss: Tensor | None, norm: Tensor, mine: Callable[[], str | None]) -> bool:
        """Whether the step is to be left out. Collective where it is, or is an error.

        Args:
            loss: of the step, 0-dim; None where the engine was not told.
            norm: of the whole gradient.
            mine: what this rank has to say of it; asked only if something is wrong.

        Raises:
            AgreedError: on every rank alike: the policy is ``raise``.
        """
        if self._policy == "ignore":
            return False
        looked_at = [value.double() for value in (loss, None if self._scaled else norm) if value is not None]
        if not looked_at or bool(torch.isfinite(torch.stack(looked_at)).all()):
            return False
        if loss is not None and not bool(torch.isfinite(loss)):
            what = f"the loss is {float(loss)}"
        else:
            what = f"the norm of the gradient is {float(norm)}"
        said = [each for each in self._grid.world.all_gather_object(mine()) if each]
        where = f": {'; '.join(said[:4])}" if said else ""
        if self._policy == "raise":
            raise AgreedError(
                f"{what}{where}. No weight was changed. Look at these samples, and the learning rate; or set nan_loss "
                'to "skip", which leaves such steps out, or "ignore"'
            )
        self.skipped += 1
        if self._grid.rank == 0:
            logging.getLogger("triax").warning("%s%s: step skipped (%d so far)", what, where, self.skipped)
        return True


class Losses:
    """The losses of a step's microbatches on this rank.

    Attributes:
        sum: of those so far, 0-dim float64.
        count: how many.
    """

    def __init__(self, grid: Grid) -> None:
        self.sum = torch.zeros((), dtype=torch.float64, device=grid.device)
        self.count = 0
        self._grid = grid
        self._each: list[Tensor] = []

    def add(self, loss: Tensor) -> Tensor:
        """One more; returns it."""
        self.sum = self.sum + loss
        self._each.append(loss)
        self.count += 1
        return loss

    def clear(self) -> None:
        """A step begins."""
        self.sum = torch.zeros_like(self.sum)
        self._each = []
        self.count = 0

    def describe(self, squares: Tensor) -> str | None:
        """The first of them that is not finite; or this rank's gradients, if they are not."""
        return describe(self._grid, list(enumerate(self._each)), squares)


def describe(grid: Grid, losses: list[tuple[int, Tensor]], squares: Tensor) -> str | None:
    """What is not finite on this rank: (microbatch, its loss), or the sum of squares of its gradients."""
    for index, loss in losses:
        if not bool(torch.isfinite(loss).all()):
            return f"{grid.describe()}: the loss of microbatch {index} is {float(loss)}"
    if bool(torch.isfinite(squares)):
        return None
    summed = ", summed over the replicas," if grid.data.size > 1 else ""
    return f"{grid.describe()}: the gradients that it holds{summed} are not finite"
