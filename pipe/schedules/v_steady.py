"""Steady states of the V-shaped schedules: the ops of one microbatch, repeated every six units.

F, I and W of each stage take one unit, and a rank has two stages: a period is 6 units, a rank's work for one
microbatch. A block is the time at which a rank starts F and I of both stages for microbatch 0; microbatch m has them
6 m units later. W takes the units that remain. So a block is possible if its four times differ modulo 6 on each rank.

A microbatch goes down the ranks, turns on the last one, and comes up; its gradient does likewise. On 4 ranks:

    V-Half                             V-Min
    unit   0         1         2       unit   0         1
           01234567890123456789012345         0123456789012345
    rank 0 F.........F...I..........I  rank 0 F......FI......I
    rank 1 ..F......F......I.......I.  rank 1 .F....F..I....I.
    rank 2 ....F...F.........I....I..  rank 2 ..F..F....I..I..
    rank 3 ......FF............I.I...  rank 3 ...FF......II...

    F down   0 on rank 0, and ``down`` units a hop
    F up     right after F down on the last rank, and one unit a hop
    I up     right after F up on rank 0, or ``turn`` units later; then ``down`` units a hop
    I down   right after I up on the last rank, or ``pause`` units later; then one unit a hop

An activation of a stage lives from its F to its I. Over both stages of a rank that is the same on all ranks: 6p + 2
turn - 1 units in V-Half (down 2, pause 1), and 4p + 2 turn in V-Min (down 1, pause 0). Divided by the period it is the
number of activations in flight, each of 1/2p of the model: about p/2 and p/3 microbatches through 1/p of the model,
half and a third of 1F1B's.

``turn`` is the least wait for which the four times of each rank differ modulo 6. In V-Half F up and I down coincide for
even p with turn = 0, and one of the I coincides with an F with 1 and 2: turn = 3. In V-Min two coincide for multiples
of 3 with turn = 0 and 1: turn = 2. For all other p it is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..program.ops import Op
from .classic import number
from .squeeze import StageOp

PERIOD = 6  # F, I and W of both stages


class Block(NamedTuple):
    """Times at which a rank starts the ops of microbatch 0, in units."""

    forward_down: int
    forward_up: int
    inputs_up: int
    inputs_down: int


class Pattern(NamedTuple):
    """Rough order of the ops of a step, for ``squeeze``.

    Attributes:
        orders: each rank's F and I, in order.
        hold: time before which each of them must not start; None: any time.
    """

    orders: list[list[StageOp]]
    hold: list[list[int]] | None


@dataclass(frozen=True)
class SteadyState:
    """Steady state of a schedule on so many ranks.

    Attributes:
        memory: activations that a rank may hold, in microbatches through 1/p of the model.
        pattern: number of microbatches -> the steady state, as often as there are microbatches.
        blocks: each rank's block, if it is a repetition of blocks.
    """

    memory: int
    pattern: Callable[[int], Pattern]
    blocks: Sequence[Block] = ()


def zb_v_steady(pipe: int) -> SteadyState:
    """Return ZB-V's: each rank runs as many forwards ahead as memory allows, then ops of its two stages in turn."""

    def pattern(microbatches: int) -> Pattern:
        orders = []
        for r in range(pipe):
            down, up = r, 2 * pipe - 1 - r
            f, g, i, j = ("F", down), ("F", up), ("I", down), ("I", up)
            warm = [f] * (2 * (pipe - r) - 1) + [g, f] * r + [g, j] * (pipe - r)
            ops = number(warm + [f, i, g, j] * microbatches + [j, i] * pipe)
            orders.append([(op.kind, op.stage) for op in ops if op.microbatch < microbatches])
        return Pattern(orders, None)

    return SteadyState(pipe, pattern)


def v_half_steady(pipe: int) -> SteadyState:
    """Return V-Half's."""
    blocks = blocks_of(pipe, down=2, turn=3 if pipe % 2 == 0 else 0, pause=1)
    return SteadyState((pipe + 2) // 2, partial(_repeated, blocks), blocks)


def v_min_steady(pipe: int) -> SteadyState:
    """Return V-Min's."""
    blocks = blocks_of(pipe, down=1, turn=2 if pipe % 3 == 0 else 0, pause=0)
    return SteadyState((pipe + 4) // 3, partial(_repeated, blocks), blocks)


STEADY_STATES: dict[str, Callable[[int], SteadyState]] = {
    "zb-v": zb_v_steady,
    "v-half": v_half_steady,
    "v-min": v_min_steady,
}


def blocks_of(pipe: int, down: int, turn: int, pause: int) -> list[Block]:
    """Return each rank's block.

    Args:
        pipe: number of ranks.
        down: units in which a microbatch, or its gradient, goes from a rank to the next one.
        turn: units between F and I of the last stage.
        pause: units in which a gradient waits on the last rank, between its two stages.
    """
    last = pipe - 1
    loss = down * last + 1 + last + 1  # rank 0 has run the last stage's F
    blocks = []
    for rank in range(pipe):
        forward_up = down * last + 1 + (last - rank)
        inputs_up = loss + turn + down * rank
        inputs_down = loss + turn + down * last + 1 + pause + (last - rank)
        blocks.append(Block(down * rank, forward_up, inputs_up, inputs_down))
    return blocks


def _repeated(blocks: Sequence[Block], microbatches: int) -> Pattern:
    """Return the pattern that holds the steady state at its times.

    The steady state lasts from rank 0's first I of stage 0 to its last F of stage 0.
    """
    begin, end = blocks[0].inputs_down, blocks[0].forward_down + PERIOD * (microbatches - 1)
    orders, hold = [], []
    for starts in repeated_starts(blocks, microbatches):
        ops = sorted(starts, key=starts.__getitem__)
        orders.append([(op.kind, op.stage) for op in ops])
        hold.append([starts[op] if begin <= starts[op] <= end else 0 for op in ops])
    return Pattern(orders, hold)


def repeated_starts(blocks: Sequence[Block], microbatches: int) -> list[dict[Op, int]]:
    """Return when each rank's F and I start if its block is repeated every period."""
    starts = []
    for rank, block in enumerate(blocks):
        down, up = rank, 2 * len(blocks) - 1 - rank
        ops = list(zip((("F", down), ("F", up), ("I", up), ("I", down)), block, strict=True))
        starts.append({Op(*op, m): time + PERIOD * m for m in range(microbatches) for op, time in ops})
    return starts
