"""Sparse attention by block masks: the patterns of the option ``sparse_attention``.

The sequence is cut into blocks of ``block`` tokens. A pattern says for each block of queries which blocks of keys it
attends to; only these are computed (block_sparse.py). Rows are queries, columns are keys:

    fixed, num_local_blocks=4        bslongformer                     bigbird
    unidirectional                   num_sliding_window_blocks=3      num_random_blocks=1

    X . . . . . . .                  X X X X X X X X                  X X X X X X X X
    X X . . . . . .                  X X X . . . . .                  X X X . . . . .
    X X X . . . . .                  X X X X . . . .                  X X X X . . . X
    X X X X . . . .                  X . X X X . . .                  X . X X X . . .
    . . . X X . . .                  X . . X X X . .                  X . . X X X . .
    . . . X X X . .                  X . . . X X X .                  X . . . X X X .
    . . . X X X X .                  X . . . . X X X                  X . . . . X X X
    . . . X X X X X                  X . . . . . X X                  X . . . . . X X

A random block may be one that is kept anyway. Random blocks are a hash of (seed, head, row, column), so they are equal
on every rank of every grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..base.seeds import derive
from ..grid.randomness.random import uniform


@dataclass(frozen=True, kw_only=True)
class Sparsity:
    """Base class of block masks.

    Args:
        block: tokens in a block.
        different_layout_per_head: each head has a layout of its own, where the pattern has several.
        num_heads: heads of the whole layer. Needed with a layout per head if the tensor axis does not divide them.
        seed: seed of random blocks.
    """

    block: int = 16
    different_layout_per_head: bool = False
    num_heads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        # Lists of a configuration file become tuples, so that a pattern can be hashed.
        for field in fields(self):
            if isinstance(getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(getattr(self, field.name)))
        if self.block < 1:
            raise ValueError(f"block={self.block} tokens. Give at least 1.")
        self._check()
        object.__setattr__(self, "_layouts", {})

    def layout(self, length: int, heads: range = range(1)) -> Tensor:
        """Return the blocks that are computed, bool (heads or 1, n, n), n the number of blocks in ``length`` tokens.

        Args:
            length: T. If ``block`` does not divide it, the last block is shorter.
            heads: the heads of the layer. Without ``different_layout_per_head`` all have the layout of head 0.
        """
        n = -(-length // self.block)
        if not self.different_layout_per_head:
            heads = range(1)
        layouts: dict[Any, Tensor] = self.__dict__["_layouts"]
        if (n, heads) not in layouts:
            layouts[n, heads] = self._layout(n, heads)
        return layouts[n, heads]

    def _layout(self, n: int, heads: range) -> Tensor:
        kept = torch.zeros(len(heads), n, n, dtype=torch.bool)
        for head, blocks in zip(heads, kept, strict=True):
            self._fill(blocks, head)
        if getattr(self, "attention", "") == "unidirectional":
            kept = kept.tril()
        return kept

    def _check(self) -> None:
        """Check the parameters.

        Raises:
            ValueError: a parameter has a wrong value, or does not go with another.
        """

    def _fill(self, blocks: Tensor, head: int) -> None:
        """Set the blocks of one head, bool (n, n), in place."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DenseSparsity(Sparsity):
    """All blocks: ``"mode": "dense"``."""

    def _fill(self, blocks: Tensor, head: int) -> None:
        blocks.fill_(True)


@dataclass(frozen=True, kw_only=True)
class FixedSparsity(Sparsity):
    """Local windows, and global blocks in each window: ``"mode": "fixed"`` (Child et al. 2019, arXiv:1904.10509).

    Args:
        num_local_blocks: blocks in a local window; the blocks of one window attend to each other.
        num_global_blocks: blocks of each window to which all blocks attend, the last ones of the window.
        attention: ``bidirectional``, or ``unidirectional``: no block attends to a later block.
        horizontal_global_attention: the global blocks also attend to all blocks. Only if bidirectional.
        num_different_global_patterns: with ``different_layout_per_head``, head h takes as its global blocks those that
            lie (h modulo this number) times ``num_global_blocks`` in front of the last ones.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def _check(self) -> None:
        _check_attention(self.attention, self.horizontal_global_attention)
        local, chosen, patterns = self.num_local_blocks, self.num_global_blocks, self.num_different_global_patterns
        if chosen < 1 or local % chosen:
            raise ValueError(
                f"num_global_blocks={chosen} does not divide num_local_blocks={local}. Give a divisor of {local}."
            )
        if not 1 <= patterns <= local // chosen:
            raise ValueError(
                f"num_different_global_patterns={patterns}, but a window of {local} blocks has {local // chosen} "
                f"places for {chosen} global blocks. Give 1 to {local // chosen}."
            )
        if patterns > 1 and not self.different_layout_per_head:
            raise ValueError(
                f"num_different_global_patterns={patterns}, but all heads have one layout. Set "
                "different_layout_per_head to true, or num_different_global_patterns to 1."
            )

    def _fill(self, blocks: Tensor, head: int) -> None:
        n, local, chosen = len(blocks), self.num_local_blocks, self.num_global_blocks
        offset = local - (1 + head % self.num_different_global_patterns) * chosen
        for start in range(0, n, local):
            blocks[start : start + local, start : start + local] = True
            # The global blocks of a short last window lie in it.
            first = start + offset if start + local <= n else max(0, min(start + offset, n - chosen))
            _set_global(blocks, first, first + chosen, self.attention, self.horizontal_global_attention)


@dataclass(frozen=True, kw_only=True)
class VariableSparsity(Sparsity):
    """Local windows of several sizes, chosen global blocks and random blocks: ``"mode": "variable"``.

    Args:
        num_random_blocks: random blocks in each row.
        local_window_blocks: blocks in the first local window, in the second, ...; the last number holds for all further
            windows.
        global_block_indices: blocks to which all blocks attend; with ``global_block_end_indices``, where ranges of such
            blocks begin. Blocks behind the end of the sequence have no effect.
        global_block_end_indices: ends of these ranges, exclusive.
        attention: ``bidirectional``, or ``unidirectional``: no block attends to a later block.
        horizontal_global_attention: the global blocks also attend to all blocks. Only if bidirectional.
    """

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False

    def _check(self) -> None:
        _check_attention(self.attention, self.horizontal_global_attention)
        _check_global(self.global_block_indices, self.global_block_end_indices)
        if not self.local_window_blocks or min(self.local_window_blocks) < 1:
            raise ValueError(
                f"local_window_blocks={list(self.local_window_blocks)}. Give at least one number, each at least 1."
            )

    def _fill(self, blocks: Tensor, head: int) -> None:
        n, start, window = len(blocks), 0, 0
        while start < n:
            size = self.local_window_blocks[min(window, len(self.local_window_blocks) - 1)]
            blocks[start : start + size, start : start + size] = True
            start, window = start + size, window + 1
        for first, last in _ranges(self.global_block_indices, self.global_block_end_indices):
            _set_global(blocks, first, last, self.attention, self.horizontal_global_attention)
        _set_random(blocks, self.num_random_blocks, self.attention, self.seed, head)


@dataclass(frozen=True, kw_only=True)
class BigBirdSparsity(Sparsity):
    """Random, sliding-window and global blocks: ``"mode": "bigbird"`` (Zaheer et al. 2020, arXiv:2007.14062).

    Args:
        num_random_blocks: random blocks in each row.
        num_sliding_window_blocks: blocks in the window around each block, itself included.
        num_global_blocks: blocks from the beginning that attend to all blocks, and to which all blocks attend.
        attention: ``bidirectional``, or ``unidirectional``: no block attends to a later block.
    """

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"

    def _check(self) -> None:
        _check_attention(self.attention)

    def _fill(self, blocks: Tensor, head: int) -> None:
        _set_window(blocks, self.num_sliding_window_blocks)
        _set_global(blocks, 0, self.num_global_blocks, "bidirectional", True)
        _set_random(blocks, self.num_random_blocks, self.attention, self.seed, head)


@dataclass(frozen=True, kw_only=True)
class BSLongformerSparsity(Sparsity):
    """Sliding window and chosen global blocks: ``"mode": "bslongformer"`` (Beltagy et al. 2020, arXiv:2004.05150).

    Args:
        num_sliding_window_blocks: blocks in the window around each block, itself included.
        global_block_indices: blocks that attend to all blocks, and to which all blocks attend; with
            ``global_block_end_indices``, where ranges of such blocks begin.
        global_block_end_indices: ends of these ranges, exclusive.
        attention: ``bidirectional``, or ``unidirectional``: no block attends to a later block.
    """

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def _check(self) -> None:
        _check_attention(self.attention)
        _check_global(self.global_block_indices, self.global_block_end_indices)

    def _fill(self, blocks: Tensor, head: int) -> None:
        _set_window(blocks, self.num_sliding_window_blocks)
        for first, last in _ranges(self.global_block_indices, self.global_block_end_indices):
            _set_global(blocks, first, last, "bidirectional", True)


_MODES: dict[str, type[Sparsity]] = {
    "dense": DenseSparsity,
    "fixed": FixedSparsity,
    "variable": VariableSparsity,
    "bigbird": BigBirdSparsity,
    "bslongformer": BSLongformerSparsity,
}


def make_sparsity(section: Mapping[str, Any]) -> Sparsity:
    """Return the pattern of the option ``sparse_attention``.

    Args:
        section: ``mode`` (by default ``fixed``), and the parameters of the mode's class.

    Raises:
        ValueError: the mode or a parameter does not exist, or a parameter has a wrong value.
    """
    options = dict(section)
    mode = options.pop("mode", "fixed")
    if mode not in _MODES:
        raise ValueError(f"sparse_attention has the mode {mode!r}. Give one of {', '.join(_MODES)}.")
    known = [field.name for field in fields(_MODES[mode])]
    for name in options:
        if name not in known:
            raise ValueError(
                f"sparse_attention has the parameter {name!r}, which the mode {mode} does not have. Leave it out; "
                f"the mode has {', '.join(known)}."
            )
    return _MODES[mode](**options)


def _check_attention(attention: str, horizontal: bool = False) -> None:
    if attention not in ("bidirectional", "unidirectional"):
        raise ValueError(f"attention is {attention!r}. Give bidirectional or unidirectional.")
    if horizontal and attention == "unidirectional":
        raise ValueError(
            "horizontal_global_attention is true with unidirectional attention, in which no block attends to later "
            "blocks. Set it to false, or attention to bidirectional."
        )


def _check_global(starts: Sequence[int], ends: Sequence[int] | None) -> None:
    if ends is None:
        return
    if len(starts) != len(ends) or any(start >= end for start, end in zip(starts, ends)):
        raise ValueError(
            f"global_block_indices={list(starts)} and global_block_end_indices={list(ends)}. Give for each start of a "
            "range an end after it."
        )


def _ranges(starts: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    return list(zip(starts, ends if ends is not None else [start + 1 for start in starts], strict=True))


def _set_global(blocks: Tensor, first: int, last: int, attention: str, horizontal: bool) -> None:
    """Let all rows attend to the columns from ``first`` to ``last``; if unidirectional, only rows from ``first`` on."""
    blocks[0 if attention == "bidirectional" else first :, first:last] = True
    if horizontal:
        blocks[first:last] = True


def _set_window(blocks: Tensor, size: int) -> None:
    """Let each row attend to the ``size`` columns around it; an even size counts as the next odd one."""
    rows = torch.arange(len(blocks))
    blocks |= (rows[:, None] - rows).abs() <= size // 2


def _set_random(blocks: Tensor, count: int, attention: str, seed: int, head: int) -> None:
    """Let each row attend to ``count`` random columns, or to all if there are fewer; none behind it if unidirectional.

    They are those with the smallest hashes.
    """
    n = len(blocks)
    if count < 1:
        return
    keys = torch.tensor([derive(seed, "sparsity", head, row) for row in range(n)])
    numbers = uniform(keys, torch.arange(n))
    if attention == "unidirectional":
        numbers += torch.ones(n, n).triu(1)  # behind all others, and dropped in the end
    blocks.scatter_(1, numbers.topk(min(count, n), dim=1, largest=False).indices, True)
