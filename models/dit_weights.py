"""Weights of ``DiTTransformer2DModel`` of the library diffusers: their names, and those of ``dit_layers``.

diffusers holds the embeddings of time step and class once in each block; they are equal in the released models. Its
model computes with other numbers than the released code in two details: frequencies of the time step of
10000^(-i / 127), not 10000^(-i / 128), and, with its default, an epsilon of 1e-5 in the norm before each MLP, not 1e-6.
``dit_layers`` follows the released code, from which the weights are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .dit_config import DiTConfig

_BLOCK = {
    "attention.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attention.out": ("attn1.to_out.0",),
    "mlp.up": ("ff.net.0.proj",),
    "mlp.down": ("ff.net.2",),
    "modulation": ("norm1.linear",),
}
_TIME = {"time_up": "timestep_embedder.linear_1", "time_down": "timestep_embedder.linear_2"}


def _names(config: DiTConfig) -> Iterator[tuple[str, list[str], bool]]:
    """Yield for each weight of ours its name, the names in diffusers, and True if those are copies and not parts."""
    blocks, last = [f"transformer_blocks.{i}" for i in range(config.num_hidden_layers)], config.num_hidden_layers + 1
    copies = [f"{block}.norm1.emb" for block in blocks]
    yield "layers.0.classes", [f"{name}.class_embedder.embedding_table.weight" for name in copies], True
    for kind in ("weight", "bias"):
        yield f"layers.0.{kind}", [f"pos_embed.proj.{kind}"], False
        for ours, theirs in _TIME.items():
            yield f"layers.0.{ours}.{kind}", [f"{name}.{theirs}.{kind}" for name in copies], True
        for i, block in enumerate(blocks):
            for ours, parts in _BLOCK.items():
                yield f"layers.{i + 1}.{ours}.{kind}", [f"{block}.{part}.{kind}" for part in parts], False
        yield f"layers.{last}.modulation.{kind}", [f"proj_out_1.{kind}"], False
        yield f"layers.{last}.linear.{kind}", [f"proj_out_2.{kind}"], False


def dit_from_diffusers(config: DiTConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a ``DiTTransformer2DModel`` by the names of ``dit_layers``, for ``load_state_dict``.

    Args:
        config: the configuration of the model.
        weights: the state dict of the model in diffusers.

    Raises:
        ValueError: the blocks have different embeddings of time step or class.
    """
    found = {}
    for ours, theirs, copies in _names(config):
        parts = [weights[name] for name in theirs]
        other = next((n for n, part in zip(theirs, parts, strict=True) if copies and not part.equal(parts[0])), None)
        if other is not None:
            raise ValueError(f"{other} differs from {theirs[0]}, but a DiT has one embedding. Make the copies equal.")
        found[ours] = parts[0] if copies else torch.cat(parts)
    return found


def dit_to_diffusers(config: DiTConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by the names of ``dit_layers``, as ``engine.gather()`` returns them, by those of diffusers.

    Args:
        config: the configuration of the model.
        weights: name -> whole weight.
    """
    found: dict[str, Tensor] = {}
    for ours, theirs, copies in _names(config):
        parts = [weights[ours]] * len(theirs) if copies else weights[ours].chunk(len(theirs))
        found |= zip(theirs, (part.clone() for part in parts), strict=True)
    return found
