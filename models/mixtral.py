"""Mixtral, Qwen3-MoE and OLMoE as lists of layers: a Llama with mixtures of experts in place of its MLPs.

Mixtral: Jiang et al. 2024, arXiv:2401.04088. Qwen3-MoE: arXiv:2505.09388. OLMoE: Muennighoff et al. 2024,
arXiv:2409.02060. Attention is Llama's (``llama.py``). The experts are sharded over the expert axis (``moe/``).

Shapes: B sequences of T tokens, D the width, V the vocabulary, t the tensor axis's size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ..grid import Grid
from ..moe.layer import MoE
from ..pipe.spec import LayerSpec
from ..randomness.random import Normal
from .config import MixtralConfig
from .layers import FinalRMSNorm, first_and_last
from .llama import LlamaBlock

# Options of ``MoE`` that are no part of a configuration, because they belong to the training.
MOE_OPTIONS = ("balance", "bias_rate", "z_loss", "capacity", "shard_tensor")


def mixtral_layers(
    config: MixtralConfig, sequence_parallel: bool = False, attention: str = "ring", **moe: Any
) -> list[LayerSpec]:
    """List the specs of a mixture's layers in order, for a ``PipelineModule``: ids (B, T) -> logits (B, T, V / t).

    The list is ``[embedding, block 0, ..., block L - 1, norm, head]``, as that of ``llama_layers``.

    Args:
        config: the model's configuration.
        sequence_parallel, attention: as for ``llama_layers``.
        moe: options of ``triax.moe.MoE`` for every block with experts: ``balance``, ``bias_rate``, ``z_loss``,
            ``capacity``, ``shard_tensor``. The coefficient of the load-balancing loss is the configuration's.

    Raises:
        TypeError: an option has another name.
    """
    check_moe_options("mixtral_layers", moe)
    first, head = first_and_last(config, sequence_parallel)
    return [
        first,
        *(
            LayerSpec(MixtralBlock, config, i, sequence_parallel=sequence_parallel, attention=attention, **moe)
            for i in range(config.num_hidden_layers)
        ),
        LayerSpec(FinalRMSNorm, config.hidden_size, config.rms_norm_eps, sequence_parallel=sequence_parallel),
        head,
    ]


class MixtralBlock(LlamaBlock):
    """``LlamaBlock`` with a mixture of experts in place of the MLP, if the configuration says so.

    Args:
        config: the model's configuration.
        layer: number of the block, counted from 0.
        grid, sequence_parallel, attention: as for ``ResidualBlock``.
        moe: further arguments of ``MoE``.
    """

    def __init__(
        self,
        config: MixtralConfig,
        layer: int,
        *,
        grid: Grid,
        sequence_parallel: bool = False,
        attention: str = "ring",
        **moe: Any,
    ) -> None:
        others: dict[str, Any] = {"clip": config.clip_qkv}
        if layer in config.moe_layers:
            others["make_mlp"] = partial(make_moe, **moe)
        super().__init__(config, layer, grid=grid, sequence_parallel=sequence_parallel, attention=attention, **others)


def make_moe(config: Any, *, grid: Grid, sequence_parallel: bool = False, **options: Any) -> nn.Module:
    """Make the mixture of experts of a configuration with ``moe_arguments``, such as a ``MixtralConfig``."""
    arguments = {"init": Normal(config.initializer_range), **config.moe_arguments(), **options}
    return MoE(config.hidden_size, grid=grid, sequence_parallel=sequence_parallel, **arguments)


def check_moe_options(function: str, options: dict[str, Any]) -> None:
    """Raise TypeError if an option is none of ``MOE_OPTIONS``."""
    if unknown := [name for name in options if name not in MOE_OPTIONS]:
        raise TypeError(f"{function} has no option {unknown[0]}. Its options are {', '.join(MOE_OPTIONS)}.")
