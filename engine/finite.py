"""What is done about a loss, or a gradient, that is nan or infinite: ``nan_loss`` in the configuration."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from ..grid import Grid
from .batch import AgreedError
from .sums import number

Policy = Literal["raise", "skip", "ignore"]


class Finite:
    """Looks at a step's loss and gradients before the weights move. Every rank decides alike, from the same sums.

    Under fp16 gradients overflow in the ordinary course of things, and the loss scale answers that; the loss itself is
    not scaled, so it is looked at all the same.

    Args:
        grid: of the engine. It is an attribute too, for engines whose steps are on one grid or another.
        policy: ``raise``, ``skip`` the step, or ``ignore``: weights take what comes.
        scaled: whether a loss scale looks after the gradients.

    Attributes:
        skipped: the number of steps left out.
    """

    def __init__(self, grid: Grid, policy: Policy, scaled: bool) -> None:
        self.grid, self._policy, self._scaled = grid, policy, scaled
        self.skipped = 0

    def leaves_out(self, loss: float | None, norm: float | None, mine: Callable[[], str | None]) -> bool:
        """Whether the step is to be left out. Collective where it is, or is an error.

        Args:
            loss: of the step, over all ranks; None where the engine was not told.
            norm: of the whole gradient; None where nothing wanted it.
            mine: what this rank has to say of it; asked only if something is wrong.

        Raises:
            AgreedError: on every rank alike: the policy is ``raise``.
        """
        if self._policy == "ignore":
            return False
        if all(value is None or math.isfinite(value) for value in (loss, None if self._scaled else norm)):
            return False
        if loss is not None and not math.isfinite(loss):
            what = f"the loss is {loss}"
        else:
            what = f"the norm of the gradient is {norm}"
        said = [each for each in self.grid.world.all_gather_object(mine()) if each]
        where = f": {'; '.join(said[:4])}" if said else ""
        if self._policy == "raise":
            raise AgreedError(
                f"{what}{where}. No weight was changed. Look at these samples, and the learning rate; or set nan_loss "
                'to "skip", which leaves such steps out, or "ignore"'
            )
        self.skipped += 1
        if self.grid.rank == 0:
            logging.getLogger("triax").warning("%s%s: step skipped (%d so far)", what, where, self.skipped)
        return True


class Losses:
    """The losses of a step's microbatches on this rank."""

    def __init__(self) -> None:
        self._each: list[Tensor | float] = []

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._each)

    def add(self, loss: Tensor) -> Tensor:
        """One more; returns it."""
        self._each.append(number(loss))
        return loss

    def sum(self) -> Tensor | float:
        """Of those so far, in float64; a tensor on a GPU."""
        total: Tensor | float = 0.0
        for each in self._each:
            total = total + each
        return total

    def describe(self, grid: Grid, squares: Sequence[Tensor]) -> str | None:
        """The first of them that is not finite; or this rank's gradients, if they are not."""
        return describe(grid, {index: (loss,) for index, loss in enumerate(self._each)}, squares)


def describe(grid: Grid, losses: Mapping[int, Sequence[Tensor | float]], squares: Sequence[Tensor]) -> str | None:
    """What is not finite on this rank.

    Args:
        grid: of the engine.
        losses: microbatch -> its loss, and whatever else.
        squares: the sum of squares of this rank's gradients, if it was wanted.
    """
    for index, (loss, *_) in sorted(losses.items()):
        if not math.isfinite(loss):
            return f"{grid.describe()}: the loss of microbatch {index} is {float(loss)}"
    if all(math.isfinite(each) for each in squares):
        return None
    summed = ", summed over the replicas," if grid.data.size > 1 else ""
    return f"{grid.describe()}: the gradients that it holds{summed} are not finite"
