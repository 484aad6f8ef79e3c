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
class PerExpert:
    """Names of the tensors of one expert, with ``{e}`` for its number, of a parameter (experts, ...).

    The tensors of an expert are concatenated along their dim 0, and the experts are stacked.
    """

    names: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """Source tensors of one parameter of triax.

    Attributes:
        theirs: Hugging Face's names of these tensors, in the order in which they are concatenated along dim 0. Of a
            parameter that triax alone has, such as a count, there are none.
        transposed: True if Hugging Face stores these matrices transposed.
        per_expert: number of tensors of each expert, for a parameter (experts, ...) whose experts are stored one by
            one; ``theirs`` lists those of expert 0 first. 0: the parameter is stored as a whole.
        other: another form in which a source may store the parameter, or None. Only the first form is written.
    """

    theirs: tuple[str, ...]
    transposed: bool = False
    per_expert: int = 0
    other: Entry | None = None


Pattern = str | tuple[str, ...] | Transposed | PerExpert
# triax's name -> Hugging Face's. {i} is the block's index, {n} the number of blocks, a final * both weight and bias.
# A list has the form that is written, then another form that is read too.
Names = Mapping[str, "Pattern | list[Pattern]"]

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


def _with_experts(mlp: str, first: tuple[str, ...], last: str) -> Names:
    """Return Llama's table with the names of a mixture of experts.

    Files have a tensor for each expert. The models of Transformers 5 have one tensor for all experts.
    """
    block, fused = f"model.layers.{{i}}.{mlp}", "model.layers.{i}.mlp.experts"
    return {
        **LLAMA,
        "layers.{i+1}.mlp.router.weight": [f"{block}.gate.weight", "model.layers.{i}.mlp.gate.weight"],
        "layers.{i+1}.mlp.routed.gate_up": [
            PerExpert(tuple(f"{block}.experts.{{e}}.{name}.weight" for name in first)),
            f"{fused}.gate_up_proj",
        ],
        "layers.{i+1}.mlp.routed.down": [
            PerExpert((f"{block}.experts.{{e}}.{last}.weight",)),
            f"{fused}.down_proj",
        ],
        "layers.{i+1}.mlp.past_loads": (),  # the loads of the step before, which only training needs
    }


MIXTRAL = _with_experts("block_sparse_moe", ("w1", "w3"), "w2")
QWEN3_MOE = _with_experts("mlp", ("gate_proj", "up_proj"), "down_proj")

_MLA, _OWN = "model.layers.{i}.self_attn", "layers.{i+1}.attention"
_SHARED = "model.layers.{i}.mlp.shared_experts"
DEEPSEEK: Names = {
    **QWEN3_MOE,
    f"{_OWN}.q.weight": f"{_MLA}.q_proj.weight",
    f"{_OWN}.q_a.weight": f"{_MLA}.q_a_proj.weight",
    f"{_OWN}.q_a_norm.weight": f"{_MLA}.q_a_layernorm.weight",
    f"{_OWN}.q_b.weight": f"{_MLA}.q_b_proj.weight",
    f"{_OWN}.kv_a.weight": f"{_MLA}.kv_a_proj_with_mqa.weight",
    f"{_OWN}.kv_a_norm.weight": f"{_MLA}.kv_a_layernorm.weight",
    f"{_OWN}.kv_b.weight": f"{_MLA}.kv_b_proj.weight",
    "layers.{i+1}.mlp.shared.gate_up": (f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"),
    "layers.{i+1}.mlp.shared.down": f"{_SHARED}.down_proj.weight",
}
DEEPSEEK_V3: Names = {
    **DEEPSEEK,
    "layers.{i+1}.mlp.router.correction_bias": "model.layers.{i}.mlp.gate.e_score_correction_bias",
}

FAMILIES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": QWEN3_MOE,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK_V3,
}


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


def expand(names: Names, blocks: int, experts: int = 0) -> dict[str, Entry]:
    """Expand a table of name patterns to the full names of a model.

    Args:
        names: the table.
        blocks: number of blocks of the model.
        experts: number of experts of a block.

    Raises:
        ValueError: a pattern has in braces something other than i, n or e, with or without a number added or
            subtracted.
    """
    expanded: dict[str, Entry] = {}
    for ours, theirs in names.items():
        forms = theirs if isinstance(theirs, list) else [theirs]
        for i in range(blocks) if "{i" in ours else (0,):
            for ending in ("weight", "bias") if ours.endswith("*") else ("",):
                entry = None
                for form in reversed(forms):
                    entry = _entry(form, ending, {"i": i, "n": blocks}, experts, entry)
                assert entry is not None
                expanded[_written(ours, ending, {"i": i, "n": blocks})] = entry
    return expanded


def _entry(form: Pattern, ending: str, numbers: Mapping[str, int], experts: int, other: Entry | None) -> Entry:
    if isinstance(form, PerExpert):
        parts = [_written(name, ending, {**numbers, "e": e}) for e in range(experts) for name in form.names]
        return Entry(tuple(parts), per_expert=len(form.names), other=other)
    transposed = isinstance(form, Transposed)
    several = (form.name,) if isinstance(form, Transposed) else (form,) if isinstance(form, str) else form
    return Entry(tuple(_written(name, ending, numbers) for name in several), transposed, other=other)


def _written(pattern: str, ending: str, numbers: Mapping[str, int]) -> str:
    def value(match: re.Match[str]) -> str:
        number = re.fullmatch(r"([a-z])([+-]\d+)?", match[1])
        if number is None or number[1] not in numbers:
            raise ValueError(f"{pattern!r} has {match[0]}. Write {{i}} for a block's index, {{i+2}}, {{n}} or {{n+1}}.")
        return str(numbers[number[1]] + int(number[2] or 0))

    named = pattern.removesuffix("*") + ending * pattern.endswith("*")
    return re.sub(r"\{([^}]*)\}", value, named)
