"""Tables that map triax's parameter names to Hugging Face's, as patterns that are expanded for each model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Transposed:
    """Name of a weight that Hugging Face stores as (inputs, outputs), as in GPT-2's ``Conv1D``."""

    name: str


@dataclass(frozen=True)
class Entry:
    """Source tensors of one parameter of triax.

    Attributes:
        theirs: Hugging Face's names of these tensors, in the order in which they are concatenated along dim 0.
        transposed: True if Hugging Face stores these matrices transposed.
    """

    theirs: tuple[str, ...]
    transposed: bool = False


# triax's name -> Hugging Face's. {i} is the block's index, {n} the number of blocks, a final * both weight and bias.
Names = Mapping[str, "str | tuple[str, ...] | Transposed"]

GPT2: Names = {
    "layers.0.weight": "transformer.wte.weight",
    "layers.1.weight": "transformer.wpe.weight",
    "layers.{i+2}.norm1.*": "transformer.h.{i}.ln_1.*",
    "layers.{i+2}.attention.qkv.*": Transposed("transformer.h.{i}.attn.c_attn.*"),
    "layers.{i+2}.attention.out.*": Transposed("transformer.h.{i}.attn.c_proj.*"),
    "layers.{i+2}.norm2.*": "transformer.h.{i}.ln_2.*",
    "layers.{i+2}.mlp.up.*": Transposed("transformer.h.{i}.mlp.c_fc.*"),
    "layers.{i+2}.mlp.down.*": Transposed("transformer.h.{i}.mlp.c_proj.*"),
    "layers.{n+2}.*": "transformer.ln_f.*",
    "layers.{n+3}.weight": "lm_head.weight",
}

LLAMA: Names = {
    "layers.0.weight": "model.embed_tokens.weight",
    "layers.{i+1}.norm1.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i+1}.attention.q.*": "model.layers.{i}.self_attn.q_proj.*",
    "layers.{i+1}.attention.kv.*": ("model.layers.{i}.self_attn.k_proj.*", "model.layers.{i}.self_attn.v_proj.*"),
    "layers.{i+1}.attention.q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i+1}.attention.k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "layers.{i+1}.attention.out.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i+1}.norm2.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i+1}.mlp.gate_up.weight": ("model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight"),
    "layers.{i+1}.mlp.down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "layers.{n+1}.weight": "model.norm.weight",
    "layers.{n+2}.weight": "lm_head.weight",
}

FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA}


def names_of(family: Any) -> Names:
    """Return the table of parameter names of a Hugging Face model family.

    Raises:
        ValueError: triax has no table for this family.
    """
    if family not in FAMILIES:
        raise ValueError(
            f"there is no table of names for model_type {family!r}, only for {', '.join(FAMILIES)}. Pass names, which "
            "maps triax's names to Hugging Face's: names={'layers.0.weight': 'model.embed.weight', ...}."
        )
    return FAMILIES[family]


def expand(names: Names, blocks: int) -> dict[str, Entry]:
    """Expand a table of name patterns to the full names of a model with the given number of blocks.

    Raises:
        ValueError: a pattern has in braces something other than i or n, with or without a number added or subtracted.
    """
    expanded: dict[str, Entry] = {}
    for ours, theirs in names.items():
        transposed = isinstance(theirs, Transposed)
        several = (theirs.name,) if isinstance(theirs, Transposed) else (theirs,) if isinstance(theirs, str) else theirs
        counts = range(blocks) if "{i" in ours else (0,)
        for i in counts:
            for ending in ("weight", "bias") if ours.endswith("*") else ("",):
                name, *parts = (
                    _written(p.removesuffix("*") + ending * p.endswith("*"), i, blocks) for p in (ours, *several)
                )
                expanded[name] = Entry(tuple(parts), transposed)
    return expanded


def _written(pattern: str, i: int, n: int) -> str:
    def value(match: re.Match[str]) -> str:
        number = re.fullmatch(r"([in])([+-]\d+)?", match[1])
        if number is None:
            raise ValueError(f"{pattern!r} has {match[0]}. Write {{i}} for a block's index, {{i+2}}, {{n}} or {{n+1}}.")
        return str({"i": i, "n": n}[number[1]] + int(number[2] or 0))

    return re.sub(r"\{([^}]*)\}", value, pattern)
