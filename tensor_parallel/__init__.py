"""The south wing: one layer's math shared out over the tensor axis."""

from __future__ import annotations

from .cross_entropy import vocab_parallel_cross_entropy
from .embedding import VocabParallelEmbedding, VocabParallelHead, gather_logits
from .linear import ColumnParallelLinear, RowParallelLinear
from .norm import LayerNorm, RMSNorm
from .regions import (
    all_reduce_copy,
    copy_all_reduce,
    gather_reduce_scatter,
    gather_split,
    reduce_scatter_gather,
    split_gather,
)

__all__ = [
    "ColumnParallelLinear",
    "LayerNorm",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "all_reduce_copy",
    "copy_all_reduce",
    "gather_logits",
    "gather_reduce_scatter",
    "gather_split",
    "reduce_scatter_gather",
    "split_gather",
    "vocab_parallel_cross_entropy",
]
