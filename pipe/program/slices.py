"""Slices of a sequence: microbatches cut along their tokens, whose slices pass the pipeline one after the other.

Causal attention reads the keys and values of earlier slices, and their gradients come from later slices. So on each
stage the forwards of a microbatch's slices run from the first to the last, and the backwards from the last to the
first. In an op the last number counts slices: with n slices, `2F7` is stage 2, forward, slice 7 % n of microbatch
7 // n.

    1f1b, 2 ranks, 2 microbatches, 2 slices
    rank 0: 0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2
    rank 1: 1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2

Sources: TeraPipe (Li et al. 2021, arXiv:2102.07988) with the order of GPipe; Seq1F1B (Sun et al. 2024,
arXiv:2406.03488) with the orders of 1F1B, interleaved 1F1B and ZB-H1; SlimPipe (Li et al. 2025, arXiv:2504.14519).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from .ops import Op, Orders

Slices = tuple[float, ...]  # relative lengths of the slices of each microbatch; (1,): microbatches are whole


def slice_lengths(slices: int | Sequence[float]) -> Slices:
    """Return the relative lengths of slices from their number, which makes them equal, or from themselves.

    Raises:
        ValueError: there is no slice, or a length is not above 0.
    """
    lengths = (1,) * slices if isinstance(slices, int) else tuple(slices)
    if not lengths or not all(0 < length < math.inf for length in lengths):
        raise ValueError(f"slices={slices!r}: give the number of slices of a sequence, 1 or more, or their lengths")
    return lengths


def in_order_of_slices(orders: Orders, slices: int) -> Orders:
    """Return orders in which the backwards of a sequence go from its last slice to its first."""

    def reversed_(op: Op) -> Op:
        microbatch, k = divmod(op.microbatch, slices)
        return op if op.kind == "F" else op._replace(microbatch=(microbatch + 1) * slices - 1 - k)

    return [[reversed_(op) for op in order] for order in orders]


def slice_bounds(length: int, slices: Sequence[float], multiple: int = 1) -> list[tuple[int, int]]:
    """Return start and stop of each slice of a sequence of ``length`` tokens.

    Args:
        length: number of tokens.
        slices: relative lengths.
        multiple: every slice but the last begins and ends at a multiple of this.

    Raises:
        ValueError: a slice would have no token.
    """
    total = sum(slices)
    ends = [round(length * end / total / multiple) * multiple for end in accumulate(slices)]
    bounds = [*pairwise([0, *ends[:-1], length])]
    if any(start >= stop for start, stop in bounds):
        least = f" of at least {multiple} tokens" if multiple > 1 else ""
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut into {len(slices)} slices{least}: give longer sequences or "
            "fewer slices (schedule.slices)"
        )
    return bounds


def require_slices(
    slices: Sequence[float], sequence: int, tensor: int = 1, context: int = 1, reason: str | None = None
) -> None:
    """Check that a run can cut its sequences into slices, before any process starts.

    Args:
        slices: relative lengths.
        sequence: tokens of a sequence.
        tensor, context: sizes of the axes.
        reason: why its model needs whole sequences; None if it does not.

    Raises:
        ValueError: it cannot; the message says why.
    """
    if len(slices) == 1:
        return
    if reason is not None:
        raise ValueError(f"the model {reason}: leave slices out, for whole sequences")
    if context > 1:
        raise ValueError(f"slices cut sequences, and so does context={context}: leave out one of them")
    slice_bounds(sequence, slices, tensor)


def slice_costs(slices: Sequence[float], attention: float = 0.0) -> list[tuple[float, float]]:
    """Return for each slice its share of the tokens, and its share of a forward pass.

    A token of causal attention sees all tokens before it. So the slice from a to b, in parts of the sequence, takes
    b - a of the linear work and b**2 - a**2 of the attention.

    Args:
        slices: relative lengths.
        attention: share of attention in a forward pass of the whole sequence, 0 to 1.
    """
    total = sum(slices)
    costs = []
    for a, b in pairwise([0.0, *(end / total for end in accumulate(slices))]):
        costs.append((b - a, (1 - attention) * (b - a) + attention * (b * b - a * a)))
    return costs


def equal_cost_slices(count: int, attention: float) -> Slices:
    """Return the lengths of slices that take equally long, as parts of the sequence (Seq1F1B, section 3.3).

    Args:
        count: number of slices.
        attention: as for ``slice_costs``.

    Raises:
        ValueError: there is no slice, or attention is not from 0 to 1.
    """
    if count < 1 or not 0 <= attention <= 1:
        raise ValueError(f"{count} slices with attention={attention}: give 1 slice or more, and a share from 0 to 1")
    linear = 1 - attention
    # The end b of slice k solves linear b + attention b**2 = k / n; written without a difference of close numbers.
    shares = [k / count for k in range(1, count + 1)]
    ends = [0.0, *(2 * x / (linear + math.sqrt(linear**2 + 4 * attention * x)) for x in shares)]
    return tuple(b - a for a, b in pairwise(ends))
