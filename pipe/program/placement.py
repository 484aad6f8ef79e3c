"""Placement of stages on the ranks of the pipe axis, as a tuple: the rank of each stage."""

from __future__ import annotations

from collections.abc import Sequence


def loop(pipe: int, chunks: int) -> tuple[int, ...]:
    """Return the placement 0 1 2 3 0 1 2 3, which continues on the first rank after the last."""
    return tuple(range(pipe)) * chunks


def zigzag(pipe: int, chunks: int) -> tuple[int, ...]:
    """Return the placement 0 1 2 3 3 2 1 0, which reverses direction after the first and the last rank."""
    return tuple(r for c in range(chunks) for r in (range(pipe) if c % 2 == 0 else reversed(range(pipe))))


def place(placement: str | Sequence[int], pipe: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each stage.

    >>> place("loop", 3, 2), place("v", 3, 2)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))

    Args:
        placement: ``"loop"``, ``"v"`` (zigzag), or the ranks themselves.
        pipe: ranks of the pipe axis.
        chunks: stages per rank.

    Raises:
        ValueError: the ranks do not give each rank ``chunks`` stages.
    """
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}, but each rank holds at least one stage: give 1 or more")
    if placement == "loop":
        return loop(pipe, chunks)
    if placement == "v":
        return zigzag(pipe, chunks)
    ranks = () if isinstance(placement, str) else tuple(placement)
    if sorted(ranks) != sorted(loop(pipe, chunks)):
        raise ValueError(
            f"placement={placement!r} does not give each of {pipe} ranks {chunks} stages: use 'loop', 'v' or a list "
            f"such as {list(loop(pipe, chunks))}"
        )
    return ranks
