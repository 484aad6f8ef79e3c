"""Section ``sparse_attention``: block masks of attention, as DeepSpeed has them."""

from __future__ import annotations

from typing import Any, Literal

from .base import SwitchSection, setting

_BLOCKS = "for the modes that have it: docs/context.md."


class SparseAttentionConfig(SwitchSection):
    """``sparse_attention``: the blocks of scores that every attention layer of the model computes."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] | None = setting(
        None, "Pattern of blocks; null: attention computes all of them."
    )
    block: int = setting(16, "Tokens in a block.", ge=1, needs="mode")
    different_layout_per_head: bool = setting(False, "Each head has a layout of its own.", needs="mode")
    num_heads: int | None = setting(
        None,
        "With different_layout_per_head: number of heads of a layer, over all tensor ranks. Needed only if it is not a "
        "multiple of the size of the tensor axis.",
        needs="mode",
    )
    seed: int = setting(0, "Seed of random blocks.", needs="mode")
    num_local_blocks: int = setting(4, f"Blocks in a local window, {_BLOCKS}", ge=1, needs="mode")
    num_global_blocks: int = setting(1, f"Global blocks, {_BLOCKS}", ge=1, needs="mode")
    attention: Literal["bidirectional", "unidirectional"] = setting(
        "bidirectional",
        "unidirectional: no block attends to a later one. Layers that are causal stay causal with either.",
        needs="mode",
    )
    horizontal_global_attention: bool = setting(False, f"Global blocks attend to all, {_BLOCKS}", needs="mode")
    num_different_global_patterns: int = setting(
        1,
        "Mode fixed, with different_layout_per_head: number of choices of a window's global blocks. The heads "
        "take them in turn.",
        ge=1,
        needs="mode",
    )
    num_random_blocks: int = setting(0, f"Random blocks in a row, {_BLOCKS}", ge=0, needs="mode")
    local_window_blocks: list[int] = setting([4], f"Blocks in each local window, {_BLOCKS}", needs="mode")
    global_block_indices: list[int] = setting([0], f"Global blocks, {_BLOCKS}", needs="mode")
    global_block_end_indices: list[int] | None = setting(None, f"Ends of global ranges, {_BLOCKS}", needs="mode")
    num_sliding_window_blocks: int = setting(3, f"Blocks in the sliding window, {_BLOCKS}", ge=1, needs="mode")

    @property
    def given(self) -> dict[str, Any]:
        """The keys that the file has, with their values."""
        return {key: getattr(self, key) for key in self.model_fields_set}
