"""Type of a tensor on an axis: how the tensors of the axis's ranks differ, and what is missing from its gradient.

| kind | the ranks hold | their gradients |
|---|---|---|
| invariant | equal tensors | equal, the whole gradient on each rank |
| replicated | equal tensors | terms of a sum |
| constant | equal tensors that need no gradient | |
| varying | different tensors: slices along ``dims``, or others | each rank's own |
| partial | terms of a sum | equal |

Dims count from the last one, -1, so that they stay when tensors broadcast. A view may merge a
sliced dim with others. Then ``level`` is the number of elements of the merged dim that the sliced dim and the dims
inside it span: 8 where (2, 8, D), sliced along its middle dim, is viewed as (16, D). 0: the sliced dim is outermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

Dims = dict[int, int]  # dim from the end -> level

INVARIANT, REPLICATED, CONSTANT, VARYING, PARTIAL = "invariant", "replicated", "constant", "varying", "partial"
EQUAL = (INVARIANT, REPLICATED, CONSTANT)


@dataclass(frozen=True)
class Sharding:
    """Type of a tensor on one axis.

    Attributes:
        kind: one of the kinds above.
        dims: of a varying tensor, the sliced dims; None if they are not known.
        reduction: of a partial tensor: ``sum``, ``max`` or ``min``.
        role: more about it. Varying: ``mask`` of comparisons, ``rows`` of this replica, ``experts`` of this rank,
            ``random`` numbers of the process. Equal: ``uniform`` if all elements are one number.
        since: the op and the line that made it so.
        parameter: the name of the parameter that it is; "" if it is none.
    """

    kind: str = CONSTANT
    dims: Dims | None = field(default_factory=dict)
    reduction: str = "sum"
    role: str = ""
    since: str = ""
    parameter: str = ""

    @property
    def equal(self) -> bool:
        """True if all ranks hold equal tensors."""
        return self.kind in EQUAL

    @property
    def levels(self) -> Dims:
        """The sliced dims with their levels; empty if they are not known."""
        return dict(self.dims or ())

    def __str__(self) -> str:
        text = f"the parameter {self.parameter}, which is {self.kind}" if self.parameter else f"{_article(self.kind)}"
        if self.kind == VARYING and self.dims:
            text += f" value, sliced along dim {', '.join(str(dim) for dim in sorted(self.dims))}"
        elif not self.parameter:
            text += " value"
        return text + (f" (from {self.since})" if self.since else "")


def varying(dims: Dims | None = None, **more: str) -> Sharding:
    """Return the type of different tensors; ``None``: it is not known in which dims they differ."""
    return Sharding(VARYING, dims, **more)


def reshaped(dims: Dims, before: Sequence[int], after: Sequence[int]) -> Dims | None:
    """Return the sliced dims of a view with another shape; None if they are not known.

    A view keeps the order of the elements, so that the ``block`` of consecutive ones that are of one slice stays.
    """
    found: Dims = {}
    for dim, level in dims.items():
        at = dim + len(before)
        inner = prod(before[at + 1 :])
        block = (level or before[at]) * inner
        if block == inner:  # a slice of one element is a dim of one element again
            places = [to for to, size in enumerate(after) if size == 1 and prod(after[to + 1 :]) == inner]
            to = places[0] if len(places) == 1 else -1
        else:
            to = max(to for to in range(len(after)) if prod(after[to:]) >= block)
            inner = prod(after[to + 1 :])
        whole = inner * after[to]
        # A dim of one element in front may count the slices' dim; a first dim counts rows.
        beside = to > 0 and after[to - 1] == 1 and not (at and before[at - 1] == 1) and (to > 1 or len(before) == 1)
        if to < 0 or block % inner or (block == whole and beside):
            return None
        found[to - len(after)] = 0 if block == whole else block // inner
    return found


def _article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
