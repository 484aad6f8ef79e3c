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

from collections.abc import Iterable, Sequence
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
    """Return the sliced dims of a view with another shape; None if they are not known."""
    found: Dims = {}
    for group, into in _groups(before, after):
        for dim in (dim for dim in dims if dim + len(before) in group):
            at = dim + len(before)
            level = (dims[dim] or before[at]) * prod(before[other] for other in group if other > at)
            inner = 1
            for other in sorted(into, reverse=True):
                size = after[other]
                if inner < level <= inner * size or (size == 1 == level == inner and len(into) == 1):
                    beside = other - 1 in into and after[other - 1] == 1
                    if level == inner * size and beside and (other > 1 or len(before) == 1):
                        return None  # a rank may have one of what the dim beside counts; a first dim counts rows
                    found[other - len(after)] = 0 if level == inner * size else level // inner
                    break
                inner *= size
            else:
                return None
    return found


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterable[tuple[list[int], list[int]]]:
    """Yield the dims of two shapes of one size in groups that hold the same elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = [i] if i < len(before) else [], [j] if j < len(after) else []
        i, j = i + len(left), j + len(right)
        size, other = prod(before[at] for at in left), prod(after[at] for at in right)
        while size != other:
            if size < other and i < len(before):
                left.append(i)
                size, i = size * before[i], i + 1
            elif j < len(after):
                right.append(j)
                other, j = other * after[j], j + 1
            else:
                break
        while i < len(before) and before[i] == 1 and (j >= len(after) or after[j] != 1):
            left.append(i)
            i += 1
        yield left, right


def _article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
