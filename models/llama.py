"""A Llama as a list of layers: token embedding, blocks, final norm, head.

The shape is Llama's (Touvron et al. 2023, arXiv:2302.13971, section 2.2): RMSNorm in front of each branch, rotary
positions, a gated MLP, no biases, grouped queries since Llama 2's 70B; with ``qkv_bias`` it is Qwen2's, with
``qk_norm`` Qwen3's. Attention and MLP are sharded over the tensor axis as GPT's are (see ``gpt``).

Shapes: B sequences of T tokens, D the width, V the vocabulary, t the tensor axis's size.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid
from ..grid.random import Normal
from ..pipe.spec import LayerSpec
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ..tensor_parallel.norm import RMSNorm
from .attention import SelfAttention
from .config import LlamaConfig, RopeScaling
from .layers import FinalRMSNorm, NextTokenLoss, ResidualBlock, dropout, first_and_last
from .rope import Rope

__all__ = ["Block", "GatedMLP", "LlamaConfig", "LlamaLoss", "RopeScaling", "llama"]

LlamaLoss = NextTokenLoss


def llama(config: LlamaConfig, sequence_parallel: bool = False) -> list[LayerSpec]:
    """The model's layers in order, for a ``PipelineModule``: ids (B, T) -> logits (B, T, V / t).

    The list is ``[embedding, block 0, ..., block L - 1, norm, head]``: L + 3 layers. Nothing is built here, and the
    list does not depend on the grid. The input may be ``(ids, documents)``: see ``packed``.

    Args:
        config: of the model.
        sequence_parallel: between the layers, each tensor rank holds its shard (B, T / t, D) of the sequence; t
            divides T then (Korthikanti et al. 2022, arXiv:2205.05198).

    Returns:
        The specs. With ``tie_embeddings`` the first and the last are ties of the key ``"embed"``.
    """
    first, head = first_and_last(
        config.vocab_size, config.width, config.init_std, config.tie_embeddings, sequence_parallel
    )
    return [
        first,
        *(LayerSpec(Block, config, sequence_parallel=sequence_parallel) for _ in range(config.layers)),
        LayerSpec(FinalRMSNorm, config.width, config.norm_eps, sequence_parallel=sequence_parallel),
        head,
    ]


class Block(ResidualBlock):
    """One transformer layer: x + attention(norm1(x)), then x + mlp(norm2(x)): (B, T, D) -> (B, T, D).

    Args:
        config: of the model.
        grid: its tensor axis shards heads and hidden width.
        sequence_parallel: x is a shard of the sequence, (B, T / t, D).

    Raises:
        ValueError: the tensor axis is larger than the number of heads.
    """

    def __init__(self, config: LlamaConfig, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__()
        config.check_tensor(grid.tensor.size)
        self.sequence_length = config.sequence_length  # the most that generation asks for
        self.norm1 = RMSNorm(config.width, config.norm_eps, grid=grid, sequence_parallel=sequence_parallel)
        self.attention = SelfAttention(
            config.width,
            config.heads,
            grid=grid,
            head_dim=config.head_dim,
            kv_heads=config.kv_heads,
            rope=Rope(config.head_dim, config.rope_theta, config.rope_scaling),
            bias=config.qkv_bias,
            qk_norm=config.norm_eps if config.qk_norm else None,
            init=Normal(config.init_std),
            out_init=Normal(config.residual_std),
            sequence_parallel=sequence_parallel,
        )
        self.dropout1 = dropout(config.dropout, grid, sequence_parallel)
        self.norm2 = RMSNorm(config.width, config.norm_eps, grid=grid, sequence_parallel=sequence_parallel)
        self.mlp = GatedMLP(config, grid=grid, sequence_parallel=sequence_parallel)
        self.dropout2 = dropout(config.dropout, grid, sequence_parallel)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), the hidden width sharded over the tensor axis: (B, T, D) -> (B, T, D).

    SwiGLU (Shazeer 2020, arXiv:2002.05202). ``gate_up`` is (2 hidden, D): the gate's rows, then up's, both sharded
    alike, so that a rank multiplies its own channels.
    """

    def __init__(self, config: LlamaConfig, *, grid: Grid, sequence_parallel: bool = False) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        common: dict[str, Any] = {"grid": grid, "bias": False, "unit": 1, "sequence_parallel": sequence_parallel}
        self.gate_up = ColumnParallelLinear(
            width, 2 * hidden, parts=(hidden, hidden), init=Normal(config.init_std), **common
        )
        self.down = RowParallelLinear(hidden, width, init=Normal(config.residual_std), **common)

    def forward(self, x: Tensor) -> Tensor:
        """See above."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (B, T, hidden / t) each
        y: Tensor = self.down(F.silu(gate) * up)
        return y
