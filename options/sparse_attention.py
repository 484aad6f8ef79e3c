"""Block masks of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .base import Options, option

_BLOCKS = "for the modes that have it: docs/context.md."


@dataclass(frozen=True, kw_only=True)
class SparseAttention(Options):
    """Blocks of scores that every attention layer of the model computes."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = option("fixed", "Pattern of blocks.")
    block: int = option(16, "Tokens in a block.", least=1)
    different_layout_per_head: bool = option(False, "Each head has a layout of its own.")
    num_heads: int | None = option(
        None,
        "With different_layout_per_head: number of heads of a layer, over all tensor ranks. Needed only if it is not a "
        "multiple of the size of the tensor axis.",
    )
    seed: int = option(0, "Seed of random blocks.")
    num_local_blocks: int = option(4, f"Blocks in a local window, {_BLOCKS}", least=1)
    num_global_blocks: int = option(1, f"Global blocks, {_BLOCKS}", least=1)
    attention: Literal["bidirectional", "unidirectional"] = option(
        "bidirectional",
        "unidirectional: no block attends to a later one. Layers that are causal stay causal with either.",
    )
    horizontal_global_attention: bool = option(False, f"Global blocks attend to all, {_BLOCKS}")
    num_different_global_patterns: int = option(
        1,
        "Mode fixed, with different_layout_per_head: number of choices of a window's global blocks. The heads "
        "take them in turn.",
        least=1,
    )
    num_random_blocks: int = option(0, f"Random blocks in a row, {_BLOCKS}", least=0)
    local_window_blocks: tuple[int, ...] = option((4,), f"Blocks in each local window, {_BLOCKS}")
    global_block_indices: tuple[int, ...] = option((0,), f"Global blocks, {_BLOCKS}")
    global_block_end_indices: tuple[int, ...] | None = option(None, f"Ends of global ranges, {_BLOCKS}")
    num_sliding_window_blocks: int = option(3, f"Blocks in the sliding window, {_BLOCKS}", least=1)
