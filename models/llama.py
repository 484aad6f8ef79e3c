"""A Llama as a list of layers: token embedding, blocks, final norm, head.

The architecture is Llama's (Touvron et al. 2023, arXiv:2302.13971, section 2.2): RMSNorm before each residual branch,
rotary positions, a gated MLP, and grouped queries as in Llama 2 70B. With ``qkv_bias`` the architecture is Qwen2's,
with ``qk_norm`` Qwen3's, with ``sliding_window`` Mistral's, with ``no_rope_layers`` SmolLM3's. Attention and MLP are
sharded over the tensor axis as in ``gpt.py``.

Shapes: B sequences of T tokens, D the width, V the vocabulary, t the tensor axis's size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from ..grid import Grid
from ..pipe.spec import LayerSpec
from ..randomness.random import Constant, Normal
from ..tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ..tensor_parallel.norm import RMSNorm
from .config import DeepseekConfig, LlamaConfig
from .layers import ACTIVATIONS, FinalRMSNorm, NextTokenLoss, ResidualBlock, first_and_last
from .rope import Rope

LlamaLoss = NextTokenLoss


def llama_layers(config: LlamaConfig, sequence_parallel: bool = False, attention: str = "ring") -> list[LayerSpec]:
    """List the specs of a Llama's layers in order, for a ``PipelineModule``: ids (B, T) -> logits (B, T, V / t).

    The list is ``[embedding, block 0, ..., block L - 1, norm, head]``, which are L + 3 layers. The layers are built
    later, by the ``PipelineModule``, and the list does not depend on the grid. The input may be ``(ids, documents)``
    for packed rows (see ``packed.py``).

    Args:
        config: the model's configuration.
        sequence_parallel: keep on each tensor-parallel rank, between the layers, only its shard (B, T / t, D) of the
            sequence. The tensor axis's size t must divide T (Korthikanti et al. 2022, arXiv:2205.05198).
        attention: how the ranks of the context axis compute attention: ``ring``, ``ulysses`` or ``gather``. It has no
            effect on a grid with context=1.

    Returns:
        The specs. With ``tie_word_embeddings`` the first and the last spec are tied with the key ``"embed"``.
    """
    first, head = first_and_last(config, sequence_parallel)
    return [
        first,
        *(
            LayerSpec(LlamaBlock, config, i, sequence_parallel=sequence_parallel, attention=attention)
            for i in range(config.num_hidden_layers)
        ),
        LayerSpec(FinalRMSNorm, config.hidden_size, config.rms_norm_eps, sequence_parallel=sequence_parallel),
        head,
    ]


class GatedMLP(nn.Module):
    """SwiGLU MLP ``down(silu(gate(x)) * up(x))``, sharded over the tensor axis: (B, T, D) -> (B, T, D).

    Shazeer 2020, arXiv:2002.05202. ``gate_up`` is (2 hidden, D), the rows of gate followed by the rows of up. Gate and
    up are sharded by the same channels, so that a rank multiplies only channels that it holds.

    Args:
        config: the model's configuration.
        grid, sequence_parallel: as for ``ResidualBlock``.
        activation: name in ``ACTIVATIONS`` of the function of the gate.
        bias: add biases, with initial value 0.
    """

    def __init__(
        self,
        config: LlamaConfig | DeepseekConfig,
        *,
        grid: Grid,
        sequence_parallel: bool = False,
        activation: str = "silu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        width, hidden, self.activation = config.hidden_size, config.intermediate_size, ACTIVATIONS[activation]
        common: dict[str, Any] = {"grid": grid, "bias": bias, "unit": 1, "sequence_parallel": sequence_parallel}
        common["bias_init"] = Constant(0.0)
        self.gate_up = ColumnParallelLinear(
            width, 2 * hidden, parts=(hidden, hidden), init=Normal(config.initializer_range), **common
        )
        self.down = RowParallelLinear(hidden, width, init=Normal(config.residual_std), **common)

    def forward(self, x: Tensor) -> Tensor:
        """Run the MLP: (B, T, D) -> (B, T, D)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (B, T, hidden / t) each
        y: Tensor = self.down(self.activation(gate) * up)
        return y


class LlamaBlock(ResidualBlock):
    """``ResidualBlock`` of Llama's family, with RMSNorm, rotary positions and a gated MLP.

    Args:
        config: the model's configuration.
        layer: number of the block, counted from 0.
        grid, sequence_parallel: as for ``ResidualBlock``.
        others: further arguments of ``ResidualBlock``.
    """

    norm = RMSNorm

    def __init__(
        self, config: LlamaConfig, layer: int = 0, *, grid: Grid, sequence_parallel: bool = False, **others: Any
    ) -> None:
        settings: dict[str, Any] = {
            "head_dim": config.head_dim,
            "kv_heads": config.num_key_value_heads,
            "rope": Rope(config.head_dim, *config.rope_of(layer)) if config.has_rope(layer) else None,
            "window": config.window_of(layer),
            "bias": config.qkv_bias,
            "out_bias": config.out_bias,
            "qk_norm": config.rms_norm_eps if config.qk_norm or config.qk_norm_all_heads else None,
            "norm_all_heads": config.qk_norm_all_heads,
            "make_mlp": partial(GatedMLP, bias=config.mlp_bias),
        }
        super().__init__(config, grid=grid, sequence_parallel=sequence_parallel, **(settings | others))
        self.max_position_embeddings = config.max_position_embeddings  # the most that generation asks for
