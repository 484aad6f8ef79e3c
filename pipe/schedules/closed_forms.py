"""Closed forms of published schedules: idle time of a step, and activations in flight, as their papers state them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ..program.activations import largest_counts

# (forward, input gradients, weight gradients, chunks) -> 1/(pipe - 1) of a rank's idle time in a step
Idle = Callable[[float, float, float, int], float]
# (pipe, microbatches, chunks) -> for each rank the largest numbers of microbatches that its stages hold; None: no form
InFlight = Callable[[int, int, int], list[list[tuple[float, ...]]] | None]


@dataclass(frozen=True)
class ClosedForm:
    """Idle time of a schedule whose ranks all take the same times.

    Attributes:
        idle: 1/(pipe - 1) of a rank's idle time.
        repeated: part of ``idle`` that is idle in the repeated part of the schedule too: a lower bound of any step.
        least: pipe -> the least number of microbatches for which it holds.
        whole_rounds: it holds for multiples of pipe microbatches alone.
        short_weights: it holds if the weight gradients take no longer than each of the other passes.
    """

    idle: Idle
    repeated: Idle
    least: Callable[[int], int] = lambda pipe: 1
    whole_rounds: bool = False
    short_weights: bool = False

    def holds(self, pipe: int, microbatches: int, forward: float, inputs: float, weights: float) -> bool:
        """Return True if the form is exact for these sizes and times."""
        long = self.short_weights and weights > min(forward, inputs)
        return microbatches >= self.least(pipe) and not long and not (self.whole_rounds and microbatches % pipe)


def _whole(forward: float, inputs: float, weights: float, chunks: int) -> float:
    """Narayanan et al. 2021, arXiv:2104.04473, section 2.2."""
    return (forward + inputs + weights) / chunks


def _zb_h1(forward: float, inputs: float, weights: float, chunks: int) -> float:
    """Qi et al. 2023, arXiv:2401.10241, table 1."""
    return max(0.0, forward + inputs - weights)


def _zb_h2(forward: float, inputs: float, weights: float, chunks: int) -> float:
    return max(forward, forward + inputs - 2 * weights, inputs - forward)


def _zb_v(forward: float, inputs: float, weights: float, chunks: int) -> float:
    return max(inputs / 2, inputs - weights, forward - inputs / 2, forward - weights)


WHOLE = ClosedForm(_whole, _whole)
ROUNDS = ClosedForm(_whole, _whole, whole_rounds=True)
ZB_H1 = ClosedForm(_zb_h1, _zb_h1, lambda pipe: pipe, short_weights=True)
ZB_H2 = ClosedForm(_zb_h2, lambda f, i, w, chunks: max(f, f + i - 2 * w), lambda pipe: 2 * pipe, short_weights=True)
ZB_V = ClosedForm(
    _zb_v, lambda f, i, w, chunks: max(f / 2, i / 2, max(f, i) - w), lambda pipe: 2 * pipe, short_weights=True
)


def all_in_flight(pipe: int, microbatches: int, chunks: int) -> list[list[tuple[float, ...]]]:
    """Every microbatch: all forward passes run before the first backward pass."""
    return [[(microbatches,) * chunks]] * pipe


def one_f_one_b_in_flight(pipe: int, microbatches: int, chunks: int) -> list[list[tuple[float, ...]]]:
    """One microbatch for each stage from the rank's own to the last."""
    return [[(min(pipe - rank, microbatches),)] for rank in range(pipe)]


def zb_h1_in_flight(pipe: int, microbatches: int, chunks: int) -> list[list[tuple[float, ...]]]:
    """One microbatch for each stage."""
    return [[(min(pipe, microbatches),)]] * pipe


def zb_h2_in_flight(pipe: int, microbatches: int, chunks: int) -> list[list[tuple[float, ...]]] | None:
    """Nearly two microbatches for each stage, if there are so many."""
    return [[(2 * pipe - 1,)]] * pipe if microbatches >= 2 * pipe else None


def zb_v_in_flight(pipe: int, microbatches: int, chunks: int) -> list[list[tuple[float, ...]]] | None:
    """Two microbatches for each rank, divided between its two stages."""
    if microbatches < 2 * pipe:
        return None
    return [[(2 * pipe - rank, rank), (2 * pipe - rank - 1, rank + 1)] for rank in range(pipe)]


@functools.cache
def interleaved_in_flight(pipe: int, microbatches: int, chunks: int) -> list[list[tuple[float, ...]]] | None:
    """Counts of ``classic.interleaved`` with whole groups of microbatches."""
    if microbatches >= pipe and microbatches % pipe:
        return None
    return [_interleaved(pipe, chunks, microbatches, rank) for rank in range(pipe)]


def _interleaved(pipe: int, chunks: int, microbatches: int, rank: int) -> list[tuple[float, ...]]:
    """Return one rank's part of ``interleaved_in_flight``."""
    group = min(pipe, microbatches)
    period, total = group * chunks, microbatches * chunks
    ahead = min(total, 2 * (pipe - rank - 1) + period - group + 1)  # forwards before the first backward
    last = min(total - ahead, period)

    # A rank holds most behind `ahead + k` forwards and `k` backwards. Their chunks change where a whole group is done.
    periods, rest = divmod(ahead, period)
    held: list[float] = [periods * group + min(max(rest - chunk * group, 0), group) for chunk in range(chunks)]
    counts, k = [tuple(held)], 0
    for end in sorted({last, *range(group, last, group), *range(-ahead % group, last, group)}):
        held[(ahead + k) % period // group] += end - k
        held[chunks - 1 - k % period // group] -= end - k
        counts.append(tuple(held))
        k = end
    return largest_counts(counts)
