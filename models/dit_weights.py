"""Weights of diffusion transformers of the library diffusers: their names, and those of triax.

``DiTTransformer2DModel`` holds the embeddings of time step and class once in each block; they are equal in the released
models. It computes with other numbers than the released code in two details: frequencies of the time step of
10000^(-i / 127), not 10000^(-i / 128), and, with its default, an epsilon of 1e-5 in the norm before each MLP, not 1e-6.
``dit_layers`` follows the released code, from which the weights are.

``FluxTransformer2DModel`` has in each single block one weight behind attention and MLP, which are two here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .dit_config import DiTConfig
from .flux_config import FluxConfig

_BLOCK = {
    "attention.qkv": "attn1.to_q attn1.to_k attn1.to_v",
    "attention.out": "attn1.to_out.0",
    "mlp.up": "ff.net.0.proj",
    "mlp.down": "ff.net.2",
    "modulation": "norm1.linear",
}
_TIME = {"time_up": "timestep_embedder.linear_1", "time_down": "timestep_embedder.linear_2"}

_FLUX_NORMS = {"attention.q_norm": "attn.norm_q", "attention.k_norm": "attn.norm_k"}
_FLUX_SINGLE = {"attention.qkv": "attn.to_q attn.to_k attn.to_v", "mlp.up": "proj_mlp", "modulation": "norm.linear"}
_FLUX_SINGLE |= {"attention.out mlp.down": "proj_out", **_FLUX_NORMS}
_FLUX_DOUBLE = {f"image.{ours}": theirs.replace("attn1", "attn") for ours, theirs in (_BLOCK | _FLUX_NORMS).items()}
_FLUX_DOUBLE |= {
    "text.attention.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
    "text.attention.out": "attn.to_add_out",
    "text.attention.q_norm": "attn.norm_added_q",
    "text.attention.k_norm": "attn.norm_added_k",
    "text.mlp.up": "ff_context.net.0.proj",
    "text.mlp.down": "ff_context.net.2",
    "text.modulation": "norm1_context.linear",
}
_Names = Iterator[tuple[list[str], list[str], bool]]


def _names(config: DiTConfig | FluxConfig) -> _Names:
    """Yield names of ours and in diffusers of the same numbers, and True if the latter are copies and not parts.

    Parts in diffusers are rows of one weight of ours. Two weights of ours are columns of one in diffusers.
    """
    return _flux_names(config) if isinstance(config, FluxConfig) else _dit_names(config)


def _dit_names(config: DiTConfig) -> _Names:
    blocks, last = [f"transformer_blocks.{i}" for i in range(config.num_hidden_layers)], config.num_hidden_layers + 1
    copies = [f"{block}.norm1.emb" for block in blocks]
    yield ["layers.0.classes"], [f"{name}.class_embedder.embedding_table.weight" for name in copies], True
    for kind in ("weight", "bias"):
        yield [f"layers.0.{kind}"], [f"pos_embed.proj.{kind}"], False
        for ours, theirs in _TIME.items():
            yield [f"layers.0.{ours}.{kind}"], [f"{name}.{theirs}.{kind}" for name in copies], True
        for i, block in enumerate(blocks):
            for ours, parts in _BLOCK.items():
                yield [f"layers.{i + 1}.{ours}.{kind}"], [f"{block}.{part}.{kind}" for part in parts.split()], False
        yield [f"layers.{last}.modulation.{kind}"], [f"proj_out_1.{kind}"], False
        yield [f"layers.{last}.linear.{kind}"], [f"proj_out_2.{kind}"], False


def _flux_names(config: FluxConfig) -> _Names:
    first = {"patches": "x_embedder", "text": "context_embedder"}
    for i, name in enumerate(("timestep", "text", "guidance")[: 2 + config.guidance_embeds]):
        first |= {f"{ours}.{i}": f"time_text_embed.{name}_embedder.linear_{n}" for n, ours in ((1, "up"), (2, "down"))}
    last = {"modulation": "norm_out.linear", "linear": "proj_out"}
    double = [(f"transformer_blocks.{i}.", _FLUX_DOUBLE) for i in range(config.num_double_layers)]
    single = [(f"single_transformer_blocks.{i}.", _FLUX_SINGLE) for i in range(config.num_single_layers)]
    for i, (block, table) in enumerate([("", first), *double, *single, ("", last)]):
        for ours, theirs in table.items():
            parts, names = theirs.split(), ours.split()
            yield [f"layers.{i}.{name}.weight" for name in names], [f"{block}{part}.weight" for part in parts], False
            if "_norm" not in ours:  # one bias serves two weights whose products are added
                yield [f"layers.{i}.{names[-1]}.bias"], [f"{block}{part}.bias" for part in parts], False


def dit_from_diffusers(config: DiTConfig | FluxConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a model of diffusers by the names of ``dit_layers`` or ``flux_layers``.

    They are for ``load_state_dict``.

    Args:
        config: the configuration of the model.
        weights: the state dict of the ``DiTTransformer2DModel`` or ``FluxTransformer2DModel``.

    Raises:
        ValueError: the blocks of a DiT have different embeddings of time step or class.
    """
    found: dict[str, Tensor] = {}
    for ours, theirs, copies in _names(config):
        parts = [weights[name] for name in theirs]
        other = next((n for n, part in zip(theirs, parts, strict=True) if copies and not part.equal(parts[0])), None)
        if other is not None:
            raise ValueError(f"{other} differs from {theirs[0]}, but a DiT has one embedding. Make the copies equal.")
        whole = parts[0] if copies else torch.cat(parts)
        widths = [config.hidden_size, config.intermediate_size] if len(ours) == 2 else [whole.shape[-1]]
        found |= zip(ours, whole.split(widths, -1), strict=True)
    return found


def dit_to_diffusers(config: DiTConfig | FluxConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by the names of ``dit_layers`` or ``flux_layers`` by those of diffusers.

    Args:
        config: the configuration of the model.
        weights: name -> whole weight, as ``engine.gather()`` returns them.
    """
    found: dict[str, Tensor] = {}
    for ours, theirs, copies in _names(config):
        whole = torch.cat([weights[name] for name in ours], -1)
        parts = [whole] * len(theirs) if copies else whole.chunk(len(theirs))
        found |= zip(theirs, (part.clone() for part in parts), strict=True)
    return found
