"""Families of Hugging Face's models: for each a table of names and a few flags. A new family is one entry of FAMILIES.

An entry says how a ``config.json`` of the family reads as a configuration of ``models/config.py``, what its parameters
are called, and how ``parallelize`` shards its modules. ``load_hf``, ``save_hf``, ``hf_layers`` and ``parallelize`` know
no family beyond this file. docs/models.md shows how to add one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...tensor_parallel.plans import (
    Column,
    FusedHeads,
    KeyValue,
    Local,
    OnAllHeads,
    OnEachHead,
    OnHeads,
    Row,
    Style,
    Vocab,
)
from ..config import DecoderConfig, DeepseekConfig, GPTConfig, LlamaConfig, MixtralConfig, TransformerConfig
from . import hybrids
from .names import Fused, Names, OneRow, PerExpert, PerHead, Repeated, Transposed

Config = Mapping[str, Any]  # content of a config.json
Key = str | tuple[str, Any]

CLASSIFIER = "ForSequenceClassification"  # ending of the names of transformers' classes with a score


@dataclass(frozen=True)
class Family:
    """Description of one family of Hugging Face's models.

    Attributes:
        prefix: prefix of the names of the family's classes in transformers, such as ``Llama``.
        plan: the plan of ``parallelize``, from transformers' configuration of a model; None: ``parallelize`` does not
            know the family. A pattern that matches no module of the model is left out.
        config: class of the configuration; None: only ``parallelize`` knows the family.
        names: triax's parameter names -> Hugging Face's, or a function that makes this table from a ``config.json``.
        keys: field of the configuration -> key of ``config.json``, or (key, its default in transformers' configuration
            class). A key without a default must be there. null stands for 0 where the field's own default is 0.
        inverse: fields whose value is 1 divided by the key's.
        flags: fields that have the same value in all models of the family.
        aliases: another name of a key -> the key. It counts if a file has both, as in transformers.
        only: key of ``config.json`` -> the values that are supported. The first one is its default, and is written.
        rope: defaults of the rotary positions: ``rope_theta`` and, if the family has it, ``partial_rotary_factor``, and
            ``original_max_position_embeddings`` if the family's class has one;
            ``llama_4_scaling_beta`` if it has that;
            the same under the names ``rotary_emb_base`` and ``rotary_pct``, if Transformers 4 wrote these. Empty: the
            family has no rotary positions.
        default_rope: the rotary positions of a file that says nothing of them, if its class does not take the default.
        scalings: the types of ``rope_type`` that the family has, beside ``default``.
        scaled: ``rope_parameters`` where ``config.json`` has none.
        window_size: default of ``sliding_window``.
        slides: function that tells from the content of ``config.json`` whether a block, counted from 0, has the window,
            if there are no ``layer_types``; None: every block has it.
        window: how the family has sliding windows: the word ``all`` stands for a window in every block that
            ``sliding_window`` gives, ``types`` for ``layer_types``, ``flag`` for ``use_sliding_window``, which is False
            if it is missing. Empty: no windows.
        read: function that returns further fields, from the content of ``config.json``.
        write: function that returns further keys, from the configuration.
        blocks: True if ``hf_layers`` can list the family's own blocks.
        embedding_dropout: key of the dropout of the embeddings, which ``hf_layers`` applies.
    """

    prefix: str
    plan: Callable[[Any], dict[str, Style]] | None = None
    config: type[TransformerConfig] | None = None
    names: Names | Callable[[Config], Names] = field(default_factory=dict)
    keys: Mapping[str, Key] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rope: Mapping[str, float] = field(default_factory=dict)
    scalings: tuple[str, ...] = ("llama3", "yarn", "linear", "dynamic", "longrope")
    scaled: Mapping[str, Any] = field(default_factory=dict)
    window: str = ""
    window_size: int | None = None
    slides: Callable[[Config, int], bool] | None = None
    read: Callable[[Config], dict[str, Any]] | None = None
    write: Callable[[Any], dict[str, Any]] | None = None
    blocks: bool = True
    embedding_dropout: str = ""
    inverse: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    default_rope: Mapping[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """Name of the family's class of language models, as ``config.json`` lists it under ``architectures``."""
        return self.prefix + ("LMHeadModel" if self.prefix == "GPT2" else "ForCausalLM")

    @property
    def classifier(self) -> str:
        """Name of the family's class of models with a score in place of logits; empty if transformers has none."""
        return {"Olmoe": "", "Gemma3": f"Gemma3Text{CLASSIFIER}"}.get(self.prefix, self.prefix + CLASSIFIER)


# ------------------------------------------------------------------------------------------- keys of config.json

_SIZES = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads")
_WIDTHS: dict[str, Key] = {name: name for name in (*_SIZES, "intermediate_size")}
_COMMON: dict[str, Key] = _WIDTHS | {
    "tie_word_embeddings": ("tie_word_embeddings", False),
    "initializer_range": ("initializer_range", 0.02),
}
_LLAMA_KEYS: dict[str, Key] = _COMMON | {
    "num_key_value_heads": ("num_key_value_heads", 0),
    "head_dim": ("head_dim", 0),
    "rms_norm_eps": ("rms_norm_eps", 1e-6),
}
_GPT2_SIZES: dict[str, Key] = dict(
    zip(_SIZES, ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"), strict=True)
)
_GPT2_ALIASES = {name: str(_GPT2_SIZES[name]) for name in _SIZES[1:]}
_TIED: dict[str, Key] = {"tie_word_embeddings": ("tie_word_embeddings", True)}
_ATTENTION_BIAS: dict[str, Key] = dict.fromkeys(("qkv_bias", "out_bias"), ("attention_bias", False))
_NO_DROPOUT: dict[str, tuple[Any, ...]] = {"attention_dropout": (0.0, None)}
_SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), **_NO_DROPOUT}
_ACTS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")  # of ``models/layers.ACTIVATIONS``
_ANY_ACT: dict[str, tuple[Any, ...]] = {"hidden_act": _ACTS, **_NO_DROPOUT}
_HIDDEN_ACT: dict[str, Key] = {"hidden_act": ("hidden_act", "silu")}
_NO_BIASES: dict[str, tuple[Any, ...]] = {"attention_bias": (False,)}
_LAYER_NORM = {"norm": "layer", "gated": False}

# ------------------------------------------------------------------------------------------- names of parameters

_GPT2_NAMES: Names = {
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


def _block(first: int, **names: Any) -> Names:
    """Return a table of the parameters of block i, which is layer i + ``first``; ``__`` stands for a dot."""
    return {f"layers.{{i+{first}}}.{ours.replace('__', '.')}.*": theirs for ours, theirs in names.items()}


def _ends(embedding: str, norm: str, first: int = 1) -> Names:
    """Return a table of the token embedding, the final norm and the head."""
    head = {f"layers.{{n+{first + 1}}}.*": "lm_head.*"}
    return {"layers.0.weight": f"{embedding}.weight", f"layers.{{n+{first}}}.*": f"{norm}.*", **head}


_AT = "model.layers.{i}"
_ATTENTION = _block(
    1,
    attention__q=f"{_AT}.self_attn.q_proj.*",
    attention__kv=(f"{_AT}.self_attn.k_proj.*", f"{_AT}.self_attn.v_proj.*"),
    attention__q_norm=f"{_AT}.self_attn.q_norm.*",
    attention__k_norm=f"{_AT}.self_attn.k_norm.*",
    attention__out=f"{_AT}.self_attn.o_proj.*",
)
_NORMS = _block(1, norm1=f"{_AT}.input_layernorm.*", norm2=f"{_AT}.post_attention_layernorm.*")
_GATED = _block(1, mlp__gate_up=(f"{_AT}.mlp.gate_proj.*", f"{_AT}.mlp.up_proj.*"), mlp__down=f"{_AT}.mlp.down_proj.*")
_LLAMA_ENDS = _ends("model.embed_tokens", "model.norm")
_LLAMA_NAMES: Names = {**_LLAMA_ENDS, **_ATTENTION, **_NORMS, **_GATED}
_SANDWICH = _block(  # norms before and behind each branch
    1,
    norm1=f"{_AT}.input_layernorm.*",
    post_norm1=f"{_AT}.post_attention_layernorm.*",
    norm2=f"{_AT}.pre_feedforward_layernorm.*",
    post_norm2=f"{_AT}.post_feedforward_layernorm.*",
)


def _with_experts(mlp: str, first: tuple[str, ...], last: str) -> Names:
    """Return Llama's table with the names of a mixture of experts.

    Files have a tensor for each expert. The models of Transformers 5 have one tensor for all experts.
    """
    block, fused = f"{_AT}.{mlp}", f"{_AT}.mlp.experts"
    return {
        **_LLAMA_NAMES,
        "layers.{i+1}.mlp.router.weight": [f"{block}.gate.weight", f"{_AT}.mlp.gate.weight"],
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


_MIXTRAL_NAMES = _with_experts("block_sparse_moe", ("w1", "w3"), "w2")
_EXPERT_NAMES = _with_experts("mlp", ("gate_proj", "up_proj"), "down_proj")
_QWEN2_MOE_NAMES: Names = {
    **_EXPERT_NAMES,
    "layers.{i+1}.mlp.shared.gate_up": tuple(f"{_AT}.mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up")),
    "layers.{i+1}.mlp.shared.down": f"{_AT}.mlp.shared_expert.down_proj.weight",
    "layers.{i+1}.mlp.shared_gate": f"{_AT}.mlp.shared_expert_gate.weight",
}
_GPT_OSS_NAMES: Names = {
    **_LLAMA_ENDS,
    **_ATTENTION,
    **_NORMS,
    "layers.{i+1}.attention.sinks": f"{_AT}.self_attn.sinks",
    "layers.{i+1}.mlp.router.*": f"{_AT}.mlp.router.*",
    "layers.{i+1}.mlp.routed.gate_up": Transposed(f"{_AT}.mlp.experts.gate_up_proj"),
    "layers.{i+1}.mlp.routed.gate_up_bias": f"{_AT}.mlp.experts.gate_up_proj_bias",
    "layers.{i+1}.mlp.routed.down": Transposed(f"{_AT}.mlp.experts.down_proj"),
    "layers.{i+1}.mlp.routed.down_bias": f"{_AT}.mlp.experts.down_proj_bias",
    "layers.{i+1}.mlp.past_loads": (),
}
_GRANITE_MOE = f"{_AT}.block_sparse_moe"
_GRANITE_MOE_NAMES: Names = {  # names in files, then those of models of Transformers 5
    **_LLAMA_ENDS,
    **_ATTENTION,
    **_NORMS,
    "layers.{i+1}.mlp.router.weight": [f"{_GRANITE_MOE}.router.layer.weight", f"{_GRANITE_MOE}.router.weight"],
    "layers.{i+1}.mlp.routed.gate_up": [f"{_GRANITE_MOE}.input_linear.weight", f"{_GRANITE_MOE}.experts.gate_up_proj"],
    "layers.{i+1}.mlp.routed.down": [f"{_GRANITE_MOE}.output_linear.weight", f"{_GRANITE_MOE}.experts.down_proj"],
    "layers.{i+1}.mlp.past_loads": (),
}
_DEEPSEEK_NAMES: Names = {
    **_EXPERT_NAMES,
    **_block(
        1,
        attention__q=f"{_AT}.self_attn.q_proj.*",
        attention__q_a=f"{_AT}.self_attn.q_a_proj.*",
        attention__q_a_norm=f"{_AT}.self_attn.q_a_layernorm.*",
        attention__q_b=f"{_AT}.self_attn.q_b_proj.*",
        attention__kv_a=f"{_AT}.self_attn.kv_a_proj_with_mqa.*",
        attention__kv_a_norm=f"{_AT}.self_attn.kv_a_layernorm.*",
        attention__kv_b=f"{_AT}.self_attn.kv_b_proj.*",
    ),
    "layers.{i+1}.mlp.shared.gate_up": (
        f"{_AT}.mlp.shared_experts.gate_proj.weight",
        f"{_AT}.mlp.shared_experts.up_proj.weight",
    ),
    "layers.{i+1}.mlp.shared.down": f"{_AT}.mlp.shared_experts.down_proj.weight",
}
_DEEPSEEK_V3_NAMES: Names = {
    **_DEEPSEEK_NAMES,
    "layers.{i+1}.mlp.router.correction_bias": f"{_AT}.mlp.gate.e_score_correction_bias",
}
_FEED = f"{_AT}.feed_forward"
_LLAMA4_NAMES: Names = {
    **_LLAMA_ENDS,
    **_ATTENTION,
    **_NORMS,
    **_block(1, mlp__gate_up=(f"{_FEED}.gate_proj.*", f"{_FEED}.up_proj.*"), mlp__down=f"{_FEED}.down_proj.*"),
    "layers.{i+1}.mlp.router.weight": f"{_FEED}.router.weight",
    "layers.{i+1}.mlp.routed.gate_up": Transposed(f"{_FEED}.experts.gate_up_proj"),
    "layers.{i+1}.mlp.routed.down": Transposed(f"{_FEED}.experts.down_proj"),
    "layers.{i+1}.mlp.shared.gate_up": tuple(f"{_FEED}.shared_expert.{name}_proj.weight" for name in ("gate", "up")),
    "layers.{i+1}.mlp.shared.down": f"{_FEED}.shared_expert.down_proj.weight",
    "layers.{i+1}.mlp.past_loads": (),
}
_SHARED_NAMES: Names = {ours: form for ours, form in _DEEPSEEK_NAMES.items() if ".mlp.shared." in ours}
_GLM4_MOE_NAMES: Names = {
    **_EXPERT_NAMES,
    **_SHARED_NAMES,
    "layers.{i+1}.mlp.router.correction_bias": f"{_AT}.mlp.gate.e_score_correction_bias",
}
_ERNIE_MOE_NAMES: Names = {
    **_EXPERT_NAMES,
    **_SHARED_NAMES,
    "layers.{i+1}.mlp.router.correction_bias": [
        OneRow(f"{_AT}.mlp.moe_statics.e_score_correction_bias"),
        OneRow(f"{_AT}.mlp.gate.moe_statics.e_score_correction_bias"),
    ],
}
_EXAONE_MOE_NAMES: Names = {
    **_GLM4_MOE_NAMES,
    "layers.{i+1}.mlp.router.correction_bias": [
        f"{_AT}.mlp.e_score_correction_bias",
        f"{_AT}.mlp.gate.e_score_correction_bias",
    ],
}
_MINIMAX_NAMES: Names = {
    **_MIXTRAL_NAMES,
    "layers.{i+1}.mlp.router.correction_bias": [
        f"{_AT}.block_sparse_moe.e_score_correction_bias",
        f"{_AT}.mlp.e_score_correction_bias",
    ],
}


def _deepseek_v3_names(config: Config) -> Names:
    """Return DeepSeek-V3's table, with the modules of multi-token prediction behind the blocks.

    The embedding is in triax's list a second time, in front of the modules. Each module has a copy of the embedding and
    of the head.
    """
    modules = int(config.get("num_nextn_predict_layers") or 0)
    if not modules:
        return _DEEPSEEK_V3_NAMES
    blocks = {ours: form for ours, form in _DEEPSEEK_V3_NAMES.items() if ours.startswith("layers.{i+1}.")}
    found = {ours: form for ours, form in _DEEPSEEK_V3_NAMES.items() if not ours.startswith("layers.{")}
    copies = [f"model.layers.{{n+{k}}}." for k in range(modules)]
    tokens, heads = ([copy + name for copy in copies] for name in ("embed_tokens.weight", "shared_head.head.weight"))
    tied = bool(config.get("tie_word_embeddings"))
    found |= blocks
    found["layers.0.weight"] = Repeated("model.embed_tokens.weight", (*tokens, *(heads if tied else ())))
    found["layers.{n+1}.*"] = "model.norm.*"
    for k, theirs in enumerate(copies):
        module = f"layers.{{n+{k + 3}}}."
        for ours, form in blocks.items():
            found[ours.replace("layers.{i+1}.", f"{module}block.")] = _moved(form, theirs)
        found |= {f"{module}{name}.weight": f"{theirs}{name}.weight" for name in ("enorm", "hnorm", "eh_proj")}
        found[f"{module}norm.weight"] = f"{theirs}shared_head.norm.weight"
    if not tied:
        found[f"layers.{{n+{modules + 3}}}.weight"] = Repeated("lm_head.weight", tuple(heads))
    return found


def _moved(form: Any, place: str) -> Any:
    """Return a block's name, or several, as those of the block at another place."""
    if isinstance(form, str):
        return form.replace(f"{_AT}.", place)
    if isinstance(form, PerExpert):
        return PerExpert(_moved(form.names, place))
    return type(form)(_moved(each, place) for each in form)


_PHI3_NAMES: Names = {
    **_LLAMA_NAMES,
    **_block(
        1,
        attention__q=Fused(f"{_AT}.self_attn.qkv_proj.*", "q", grouped=False),
        attention__kv=Fused(f"{_AT}.self_attn.qkv_proj.*", "kv", grouped=False),
        mlp__gate_up=f"{_AT}.mlp.gate_up_proj.*",
    ),
}
_OLMO2_NAMES: Names = {
    **_LLAMA_ENDS,
    **_ATTENTION,
    **_GATED,
    **_block(1, post_norm1=f"{_AT}.post_attention_layernorm.*", post_norm2=f"{_AT}.post_feedforward_layernorm.*"),
}
_BAMBA_NAMES: Names = {
    **_ends("model.embed_tokens", "model.final_layernorm"),
    **_ATTENTION,
    **_block(
        1,
        norm1=f"{_AT}.input_layernorm.*",
        norm2=f"{_AT}.pre_ff_layernorm.*",
        mlp__gate_up=(f"{_AT}.feed_forward.gate_proj.*", f"{_AT}.feed_forward.up_proj.*"),
        mlp__down=f"{_AT}.feed_forward.down_proj.*",
    ),
}
_ARCEE_NAMES: Names = {
    **_LLAMA_ENDS,
    **_ATTENTION,
    **_NORMS,
    **_block(1, mlp__up=f"{_AT}.mlp.up_proj.*", mlp__down=f"{_AT}.mlp.down_proj.*"),
}
_STARCODER2_NAMES: Names = {
    **_LLAMA_ENDS,
    **_ATTENTION,
    **_NORMS,
    **_block(1, mlp__up=f"{_AT}.mlp.c_fc.*", mlp__down=f"{_AT}.mlp.c_proj.*"),
}
_GLM_NAMES: Names = {**_LLAMA_NAMES, **_block(1, mlp__gate_up=f"{_AT}.mlp.gate_up_proj.*")}
_GLM4_NAMES: Names = {
    **_GLM_NAMES,
    **_block(1, post_norm1=f"{_AT}.post_self_attn_layernorm.*", post_norm2=f"{_AT}.post_mlp_layernorm.*"),
}
_STABLELM_NAMES: Names = {
    **_LLAMA_NAMES,
    **{
        f"layers.{{i+1}}.attention.{part}_norm.weight": PerHead(
            f"{_AT}.self_attn.{part}_layernorm.norms.{{h}}.weight", part
        )
        for part in "qk"
    },
}
_HYPERCLOVA_NAMES: Names = {
    **_LLAMA_NAMES,
    **_block(1, post_norm1=f"{_AT}.post_norm1.*", post_norm2=f"{_AT}.post_norm2.*"),
}
_HUNYUAN_NAMES: Names = {
    **_LLAMA_NAMES,
    **_block(
        1,
        attention__q_norm=f"{_AT}.self_attn.query_layernorm.*",
        attention__k_norm=f"{_AT}.self_attn.key_layernorm.*",
    ),
}
_VAULTGEMMA_NAMES: Names = {**_LLAMA_NAMES, **_block(1, norm2=f"{_AT}.pre_feedforward_layernorm.*")}
_GEMMA2_NAMES: Names = {**_LLAMA_ENDS, **_ATTENTION, **_SANDWICH, **_GATED}
_NEOX = "gpt_neox.layers.{i}"
_NEOX_NAMES: Names = {
    **_ends("gpt_neox.embed_in", "gpt_neox.final_layer_norm"),
    **_block(
        1,
        norm1=f"{_NEOX}.input_layernorm.*",
        norm2=f"{_NEOX}.post_attention_layernorm.*",
        attention__q=Fused(f"{_NEOX}.attention.query_key_value.*", "q"),
        attention__kv=Fused(f"{_NEOX}.attention.query_key_value.*", "kv"),
        attention__out=f"{_NEOX}.attention.dense.*",
        mlp__up=f"{_NEOX}.mlp.dense_h_to_4h.*",
        mlp__down=f"{_NEOX}.mlp.dense_4h_to_h.*",
    ),
    "layers.{n+2}.*": ["lm_head.*", "embed_out.*"],  # the second name before Transformers 5
}
_PHI_NAMES: Names = {
    **_ends("model.embed_tokens", "model.final_layernorm"),
    **_ATTENTION,
    **_block(
        1,
        norm1=f"{_AT}.input_layernorm.*",
        attention__out=f"{_AT}.self_attn.dense.*",
        mlp__up=f"{_AT}.mlp.fc1.*",
        mlp__down=f"{_AT}.mlp.fc2.*",
    ),
}
_H = "transformer.h.{i}"
_BLOOM_NAMES: Names = {
    **_ends("transformer.word_embeddings", "transformer.ln_f", 2),
    "layers.1.norm.*": "transformer.word_embeddings_layernorm.*",
    **_block(
        2,
        norm1=f"{_H}.input_layernorm.*",
        norm2=f"{_H}.post_attention_layernorm.*",
        attention__q=Fused(f"{_H}.self_attention.query_key_value.*", "q"),
        attention__kv=Fused(f"{_H}.self_attention.query_key_value.*", "kv"),
        attention__out=f"{_H}.self_attention.dense.*",
        mlp__up=f"{_H}.mlp.dense_h_to_4h.*",
        mlp__down=f"{_H}.mlp.dense_4h_to_h.*",
    ),
}
_GPTJ_NAMES: Names = {
    **_ends("transformer.wte", "transformer.ln_f"),
    **_block(
        1,
        norm1=f"{_H}.ln_1.*",
        attention__q=f"{_H}.attn.q_proj.*",
        attention__kv=(f"{_H}.attn.k_proj.*", f"{_H}.attn.v_proj.*"),
        attention__out=f"{_H}.attn.out_proj.*",
        mlp__up=f"{_H}.mlp.fc_in.*",
        mlp__down=f"{_H}.mlp.fc_out.*",
    ),
}
_GPT_NEO_NAMES: Names = {
    **_ends("transformer.wte", "transformer.ln_f", 2),
    "layers.1.weight": "transformer.wpe.weight",
    **_block(
        2,
        norm1=f"{_H}.ln_1.*",
        norm2=f"{_H}.ln_2.*",
        attention__q=f"{_H}.attn.attention.q_proj.*",
        attention__kv=(f"{_H}.attn.attention.k_proj.*", f"{_H}.attn.attention.v_proj.*"),
        attention__out=f"{_H}.attn.attention.out_proj.*",
        mlp__up=f"{_H}.mlp.c_fc.*",
        mlp__down=f"{_H}.mlp.c_proj.*",
    ),
}
_NANOCHAT_NAMES: Names = {
    **_ends("model.embed_tokens", "model.norm", 2),
    "layers.1.norm.*": "model.norm.*",  # without parameters, and used twice
    **{ours.replace("{i+1}", "{i+2}"): theirs for ours, theirs in _ATTENTION.items()},
    **_block(2, mlp__up=f"{_AT}.mlp.fc1.*", mlp__down=f"{_AT}.mlp.fc2.*"),
}
_OPT = "model.decoder.layers.{i}"


def _opt_names(config: Config) -> Names:
    """Return OPT's table. OPT-350m has its norms behind the sums, no last norm, and narrower embeddings."""
    before, narrow = config.get("do_layer_norm_before", True), bool(_opt_width(config))
    first, norms = 2 + narrow, ("norm1", "norm2") if before else ("post_norm1", "post_norm2")
    ends = dict(_ends("model.decoder.embed_tokens", "model.decoder.final_layer_norm", first))
    last = f"layers.{{n+{first}}}.*"
    if not before:
        del ends[last]
    if narrow:
        ends[f"layers.{{n+{first + 2}}}.*"] = ends.pop(f"layers.{{n+{first + 1}}}.*")
        ends |= {
            "layers.1.linear.weight": "model.decoder.project_in.weight",
            f"layers.{{n+{first + 1}}}.linear.weight": "model.decoder.project_out.weight",
        }
    names = dict(zip(norms, (f"{_OPT}.self_attn_layer_norm.*", f"{_OPT}.final_layer_norm.*"), strict=True))
    return {
        **ends,
        f"layers.{first - 1}.weight": "model.decoder.embed_positions.weight",
        **_block(
            first,
            **names,
            attention__q=f"{_OPT}.self_attn.q_proj.*",
            attention__kv=(f"{_OPT}.self_attn.k_proj.*", f"{_OPT}.self_attn.v_proj.*"),
            attention__out=f"{_OPT}.self_attn.out_proj.*",
            mlp__up=f"{_OPT}.fc1.*",
            mlp__down=f"{_OPT}.fc2.*",
        ),
    }


def _falcon_names(config: Config) -> Names:
    at, two = "transformer.h.{i}", config.get("new_decoder_architecture") and _falcon_norms(config) == 2
    return {
        **_ends("transformer.word_embeddings", "transformer.ln_f"),
        **_block(
            1,
            norm1=f"{at}.ln_attn.*" if two else f"{at}.input_layernorm.*",
            norm2=f"{at}.ln_mlp.*" if two else f"{at}.post_attention_layernorm.*",
            attention__q=Fused(f"{at}.self_attention.query_key_value.*", "q"),
            attention__kv=Fused(f"{at}.self_attention.query_key_value.*", "kv"),
            attention__out=f"{at}.self_attention.dense.*",
            mlp__up=f"{at}.mlp.dense_h_to_4h.*",
            mlp__down=f"{at}.mlp.dense_4h_to_h.*",
        ),
    }


# ------------------------------------------------------------------------------ settings that are no single key


def _whole(config: Config, key: str, default: int) -> int:
    """Return a whole number that may be null."""
    value = config.get(key) or default
    if type(value) is not int:
        raise ValueError(f"{key} is {value!r}, but must be a whole number, or null.")
    return value


def _gpt2_read(config: Config) -> dict[str, Any]:
    width = config["n_embd"]
    hidden = config.get("n_inner") or 4 * width
    if hidden % width:
        raise ValueError(
            f"n_inner={hidden} is not a multiple of n_embd={width}, as triax's GPT needs (mlp_ratio x n_embd). "
            "triax.parallelize shards the Hugging Face model itself."
        )
    return {"mlp_ratio": hidden // width}


def _gpt2_write(config: DecoderConfig) -> dict[str, Any]:
    return {"n_inner": config.intermediate_size, "embd_pdrop": config.dropout, "attn_pdrop": 0.0}


def _count(config: Config, key: str, default: int | None, least: int = 0) -> int:
    """Return the whole number that a key has as its value; the default if it is missing."""
    value = config.get(key, default)
    if type(value) is not int or not least <= value <= 2**40:
        raise ValueError(f"{key} is {repr(value)[:60]}, but must be a whole number, {least} or more.")
    return value


def _smollm3_read(config: Config) -> dict[str, Any]:
    depth, interval = config["num_hidden_layers"], _count(config, "no_rope_layer_interval", 4, 1)
    kept = config.get("no_rope_layers")
    return {"no_rope_layers": (kept or [int((i + 1) % interval != 0) for i in range(depth)])[:depth]}


def _smollm3_write(config: DecoderConfig) -> dict[str, Any]:
    return {"no_rope_layers": list(config.no_rope_layers) or [1] * config.num_hidden_layers}


def _exaone4_slides(config: Config, block: int) -> bool:
    return (block + 1) % _count(config, "sliding_window_pattern", 4, 1) != 0


def _exaone4_read(config: Config) -> dict[str, Any]:
    """Blocks without a window have no rotary positions, in a model that has windows."""
    depth, types = config["num_hidden_layers"], config.get("layer_types")
    if config.get("sliding_window", 4096) is None:
        return {}
    slides = [_exaone4_slides(config, i) for i in range(depth)] if types is None else ["sliding" in t for t in types]
    return {"no_rope_layers": [int(each) for each in slides]}


def _exaone4_write(config: DecoderConfig) -> dict[str, Any]:
    """Write a window where every block is without rotary positions: a model without windows rotates in all blocks."""
    return {"sliding_window": 4096} if config.no_rope_layers and config.sliding_window is None else {}


def _cohere2_read(config: Config) -> dict[str, Any]:
    """Blocks without a window have no rotary positions."""
    depth, types = config["num_hidden_layers"], config.get("layer_types")
    slides = [_cohere2_slides(config, i) for i in range(depth)] if types is None else ["sliding" in t for t in types]
    return {"no_rope_layers": [int(each) for each in slides][:depth]}


def _cohere2_slides(config: Config, block: int) -> bool:
    return (block + 1) % _count(config, "sliding_window_pattern", 4, 1) != 0


def _stablelm_read(config: Config) -> dict[str, Any]:
    return {"shared_norm": bool(config.get("use_parallel_residual", False))}


def _gemma_read(config: Config) -> dict[str, Any]:
    act = config.get("hidden_act", "gelu_pytorch_tanh")
    return {"hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act}  # as transformers reads the first files


def _gemma_write(config: DecoderConfig) -> dict[str, Any]:
    return {"hidden_act": config.hidden_act}


def _opt_width(config: Config) -> int:
    """Return the width of the embeddings; 0: it is that of the model."""
    width = (
        config["hidden_size"]
        if config.get("word_embed_proj_dim") is None
        else _count(config, "word_embed_proj_dim", None, 1)
    )
    return 0 if width == config["hidden_size"] else width


def _opt_read(config: Config) -> dict[str, Any]:
    before = config.get("do_layer_norm_before", True)
    if not isinstance(before, bool):
        raise ValueError(f"do_layer_norm_before is {str(before)[:60]}, but must be true or false.")
    return {"embedding_size": _opt_width(config), "norm_place": "before" if before else "sum"}


def _opt_write(config: DecoderConfig) -> dict[str, Any]:
    width = config.embedding_size or config.hidden_size
    return {"word_embed_proj_dim": width, "do_layer_norm_before": config.norm_place == "before"}


def _bloom_read(config: Config) -> dict[str, Any]:
    return {"intermediate_size": 4 * config.get("hidden_size", 64)}


def _gptj_read(config: Config) -> dict[str, Any]:
    rotated, width = config.get("rotary_dim", 64), config["n_embd"] // max(config["n_head"], 1)
    if type(rotated) is not int or not 0 < rotated <= width:
        raise ValueError(f"rotary_dim is {rotated!r}, but must be from 2 to n_embd / n_head = {width}.")
    factor = rotated / width
    while int(width * factor) < rotated:  # the quotient was rounded down
        factor = math.nextafter(factor, 2.0)
    return {"partial_rotary_factor": factor, "intermediate_size": _whole(config, "n_inner", 4 * config["n_embd"])}


def _gptj_write(config: DecoderConfig) -> dict[str, Any]:
    return {"rotary_dim": config.rotary_dim, "n_inner": config.intermediate_size, "embd_pdrop": config.dropout}


def _gpt_neo_read(config: Config) -> dict[str, Any]:
    """``attention_types`` are pairs of a list of ``global`` and ``local``, and a number of repetitions."""
    types, depth = config.get("attention_types") or [[["global", "local"], 12]], config["num_layers"]
    names = {"global": "full_attention", "local": "sliding_attention"}
    found: list[str] = []
    for pair in types if isinstance(types, (list, tuple)) else ():
        kinds, count = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else ((), 0)
        if isinstance(kinds, (list, tuple)) and type(count) is int:
            found += list(kinds) * min(count, depth)
    if len(found) != depth or not all(isinstance(kind, str) and kind in names for kind in found):
        raise ValueError(
            f"attention_types has {len(found)} blocks, but num_layers is {depth}. Give pairs of a list of 'global' and "
            "'local' and a number of its repetitions, in all one word for each block."
        )
    return {
        "layer_types": [names[kind] for kind in found],
        "intermediate_size": _whole(config, "intermediate_size", 4 * config["hidden_size"]),
    }


def _gpt_neo_write(config: DecoderConfig) -> dict[str, Any]:
    kinds = ["global" if config.window_of(i) is None else "local" for i in range(config.num_hidden_layers)]
    return {
        "attention_types": [[kinds, 1]],
        "window_size": config.sliding_window or 256,
        "intermediate_size": config.intermediate_size,
        "embed_dropout": config.dropout,
    }


def _helium_read(config: Config) -> dict[str, Any]:
    heads, dim, width = config["num_attention_heads"], config.get("head_dim", 128), config["hidden_size"]
    if dim and heads * dim != width:
        raise ValueError(
            f"helium with num_attention_heads={heads} of head_dim={dim} is not implemented for hidden_size={width}, "
            "which transformers' output projection takes. Give head_dim = hidden_size / num_attention_heads."
        )
    return {}


def _hunyuan_read(config: Config) -> dict[str, Any]:
    """Scaling with a fixed ``alpha`` is a larger base of the rotary wavelengths."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    alpha, dim = rope.get("alpha"), _head_dim(config)
    if rope.get("rope_type", rope.get("type")) != "dynamic" or not alpha:
        return {}
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf or dim <= 2:
        raise ValueError(f"alpha is {alpha!r}, but must be a number above 0, for heads of more than 2 channels.")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 1e4)
    return {"rope_theta": theta * alpha ** (dim / (dim - 2)), "rope_scaling": None}


def _seed_oss_write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_dropout": 0.0}


def _hyperclova_read(config: Config) -> dict[str, Any]:
    behind = config.get("use_post_norm", True)
    if type(behind) is not bool:
        raise ValueError(f"use_post_norm is {behind!r}, but must be true or false.")
    found: dict[str, Any] = {"norm_place": "both" if behind else "before"}
    if config.get("attention_multiplier") is None:
        found["attention_multiplier"] = _head_dim(config) ** -0.5
    return found


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // max(config["num_attention_heads"], 1))


def _hyperclova_write(config: DecoderConfig) -> dict[str, Any]:
    return {"use_post_norm": config.norm_place == "both"}


def _internlm3_read(config: Config) -> dict[str, Any]:
    """Published files have ``qkv_bias`` and ``bias`` for ``attention_bias`` and ``mlp_bias``, which must be equal."""
    attention, mlp = (config.get(new, config.get(old, False)) for new, old in _INTERNLM3_BIASES)
    if type(attention) is not bool or attention != mlp:
        raise ValueError(
            f"qkv_bias is {attention!r} and bias is {mlp!r}, but InternLM3 has one setting for all biases. Write "
            "true or false for both."
        )
    return dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), attention)


_INTERNLM3_BIASES = (("attention_bias", "qkv_bias"), ("mlp_bias", "bias"))


def _internlm3_write(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def _falcon_norms(config: Config) -> int:
    """Return the number of norms of a block with the new architecture."""
    return _whole(config, "num_ln_in_parallel_attn", 2)


def _falcon_read(config: Config) -> dict[str, Any]:
    heads, new = config["num_attention_heads"], bool(config.get("new_decoder_architecture", False))
    parallel = new or bool(config.get("parallel_attn", True))
    return {
        "alibi": "rounded" if config.get("alibi") else "",
        "num_key_value_heads": _whole(config, "num_kv_heads", heads)
        if new
        else (1 if config.get("multi_query", True) else heads),
        "intermediate_size": _whole(config, "ffn_hidden_size", 4 * config["hidden_size"]),
        "parallel_residual": parallel,
        "shared_norm": parallel and (not new or _falcon_norms(config) == 1),
    }


def _falcon_write(config: DecoderConfig) -> dict[str, Any]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    new = config.parallel_residual and (not config.shared_norm or kv_heads not in (1, heads))
    return {
        "alibi": config.alibi == "rounded",
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (1 if config.shared_norm else 2) if new else None,
        "multi_query": kv_heads == 1,
        "parallel_attn": config.parallel_residual,
        "ffn_hidden_size": config.intermediate_size,
    }


def _mixtral_read(config: Config) -> dict[str, Any]:
    return {"mlp_only_layers": tuple(config.get("mlp_only_layers") or ())}


def _qwen3_moe_write(config: DecoderConfig) -> dict[str, Any]:
    return {"mlp_only_layers": list(config.mlp_only_layers)}


def _gpt_oss_read(config: Config) -> dict[str, Any]:
    kind = config.get("quantization_config") or {"quant_method": "mxfp4"}
    if not isinstance(kind, Mapping) or kind.get("quant_method") != "mxfp4":
        raise ValueError("gpt_oss with quantization_config of another quant_method than 'mxfp4' is not implemented.")
    return {}


def _dense_before(config: Config, first: int) -> tuple[int, ...]:
    """Return the blocks in front of number ``first``, none of which has experts."""
    return tuple(range(min(first, config["num_hidden_layers"])))


def _glm4_moe_read(first: int, shared: int | None, width: int | None) -> Callable[[Config], dict[str, Any]]:
    """Return a function that reads the shared experts and the first blocks, which have no experts.

    Args:
        first, shared, width: defaults of the number of these blocks, of the number of shared experts, and of their
            width; None: the key must be there.
    """

    def read(config: Config) -> dict[str, Any]:
        experts = _count(config, "n_shared_experts", shared, 1) * _count(config, "moe_intermediate_size", width)
        dense = _dense_before(config, _count(config, "first_k_dense_replace", first))
        return {"shared_expert_intermediate_size": experts, "mlp_only_layers": dense}

    return read


def _glm4_moe_write(config: DecoderConfig) -> dict[str, Any]:
    experts = config.shared_expert_intermediate_size // config.moe_intermediate_size
    return {"n_shared_experts": experts, "first_k_dense_replace": len(config.mlp_only_layers)}


def _solar_read(config: Config) -> dict[str, Any]:
    """Read the shared experts. transformers' model cannot run with heads that are rotated in part."""
    if (part := {**config, **(config.get("rope_parameters") or {})}.get("partial_rotary_factor")) not in (None, 1.0):
        raise ValueError(f"solar_open with partial_rotary_factor={part!r} is not implemented. Leave it out.")
    experts = _count(config, "n_shared_experts", 1, 1) * _count(config, "moe_intermediate_size", 1280)
    return {"shared_expert_intermediate_size": experts}


def _exaone_moe_read(config: Config) -> dict[str, Any]:
    types, depth = config.get("mlp_layer_types"), config["num_hidden_layers"]
    if types is None:
        dense = _dense_before(config, _count(config, "first_k_dense_replace", 1))
    elif not isinstance(types, list) or len(types) < depth or set(types) - {"dense", "sparse"}:
        raise ValueError(f"mlp_layer_types must be a list of 'dense' and 'sparse', one for each of {depth} blocks.")
    else:
        dense = tuple(block for block in range(depth) if types[block] == "dense")
    experts = _count(config, "num_shared_experts", 1, 1) * _count(config, "moe_intermediate_size", 1024)
    return {**_exaone4_read(config), "shared_expert_intermediate_size": experts, "mlp_only_layers": dense}


def _exaone_moe_write(config: DecoderConfig) -> dict[str, Any]:
    experts = config.shared_expert_intermediate_size // config.moe_intermediate_size
    sparse = [block in config.moe_layers for block in range(config.num_hidden_layers)]
    types = [("dense", "sparse")[each] for each in sparse]
    return {**_exaone4_write(config), "num_shared_experts": experts, "mlp_layer_types": types}


def _ernie_moe_read(config: Config) -> dict[str, Any]:
    depth, step = config["num_hidden_layers"], _count(config, "moe_layer_interval", 1, 1)
    end = depth - 1 if config.get("moe_layer_end_index", -1) == -1 else _count(config, "moe_layer_end_index", None)
    start = _count(config, "moe_layer_start_index", 1)
    sparse = [block for block in range(depth) if (block + 1) % step == 0 and start <= block <= end]
    experts = _count(config, "moe_num_shared_experts", 2) * _count(config, "moe_intermediate_size", 1536)
    dense = tuple(block for block in range(depth) if block not in sparse)
    return {"shared_expert_intermediate_size": experts, "mlp_only_layers": dense}


def _ernie_moe_write(config: DecoderConfig) -> dict[str, Any]:
    sparse = config.moe_layers
    return {
        "moe_num_shared_experts": config.shared_expert_intermediate_size // config.moe_intermediate_size,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else sparse[0] + 1,
    }


def _minimax_read(config: Config) -> dict[str, Any]:
    """Read the number of rotated channels, as the published files have it."""
    rope = config.get("rope_parameters") or {}
    if config.get("rotary_dim") is None or {**config, **rope}.get("partial_rotary_factor") is not None:
        return {}
    return {"partial_rotary_factor": _count(config, "rotary_dim", None, 1) / _count(config, "head_dim", 128, 1)}


def _llama4_read(config: Config) -> dict[str, Any]:
    depth, sparse = config["num_hidden_layers"], config.get("moe_layers")
    if sparse is None:
        step = _count(config, "interleave_moe_layer_step", 1, 1)
        sparse = range(step - 1, depth, step)
    elif not isinstance(sparse, list) or any(type(each) is not int for each in sparse):
        raise ValueError(f"moe_layers is {str(sparse)[:60]}, but must be a list of numbers of blocks.")
    rotated = _smollm3_read(config)["no_rope_layers"]
    types = config.get("layer_types") or [("full_attention", "chunked_attention")[bool(each)] for each in rotated]
    tuned = config.get("attn_temperature_tuning", True)
    return {
        "mlp_only_layers": tuple(block for block in range(depth) if block not in sparse),
        "no_rope_layers": tuple(rotated),
        "layer_types": tuple(types)[:depth],
        "attn_scale": config.get("attn_scale", 0.1) if tuned else 0.0,
    }


def _llama4_write(config: DecoderConfig) -> dict[str, Any]:
    chunks = map(config.chunk_of, range(config.num_hidden_layers))
    return {
        **_smollm3_write(config),
        "moe_layers": list(config.moe_layers),
        "layer_types": ["full_attention" if chunk is None else "chunked_attention" for chunk in chunks],
        "attn_temperature_tuning": config.attn_scale != 0,
    }


def _qwen3_next_read(config: Config) -> dict[str, Any]:
    return {**hybrids.qwen_read(config), **_mixtral_read(config)}


def _qwen3_next_write(config: DecoderConfig) -> dict[str, Any]:
    return {**hybrids.qwen_write(config), **_qwen3_moe_write(config)}


def _deepseek_v2_read(config: Config) -> dict[str, Any]:
    grouped = config.get("topk_method") == "group_limited_greedy"
    return {name: (config.get(name) or 1) if grouped else 1 for name in ("n_group", "topk_group")}


def _deepseek_v2_write(config: DeepseekConfig) -> dict[str, Any]:
    method = "group_limited_greedy" if config.n_group > 1 else "greedy"
    groups = {"n_group": config.n_group, "topk_group": config.topk_group}
    return {"topk_method": method, "num_key_value_heads": config.num_attention_heads, **groups}


def _deepseek_v3_write(config: DeepseekConfig) -> dict[str, Any]:
    return {"num_key_value_heads": config.num_attention_heads}


# ----------------------------------------------------------------------------------------- plans of parallelize


def _heads(config: Any) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key/value heads, and the width of a head."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _gpt2_plan(config: Any) -> dict[str, Style]:
    dim = config.n_embd // config.n_head
    return {
        "*wte": Vocab(),
        "*.attn": Local({"num_heads": 1, "split_size": dim}),
        "*.crossattention": Local({"num_heads": 1, "split_size": dim}),
        "*.attn.c_attn": Column(parts=3, unit=dim),
        "*.crossattention.c_attn": Column(parts=2, unit=dim),
        "*.crossattention.q_attn": Column(unit=dim),
        "*.attn.c_proj": Row(unit=dim),
        "*.crossattention.c_proj": Row(unit=dim),
        "*.mlp.c_fc": Column(),
        "*.mlp.c_proj": Row(),
        "lm_head": Column(gather_output=True),
    }


def _llama_plan(config: Any) -> dict[str, Style]:
    """Return the plan of Llama and of its relatives, which differ in biases, norms and the names of layers."""
    heads, kv_heads, dim = _heads(config)
    return {
        "*embed_tokens": Vocab(),
        "*.self_attn.q_proj": Column(unit=dim, group="qkv"),
        "*.self_attn.[kv]_proj": KeyValue(heads, kv_heads, dim, group="qkv"),
        "*.self_attn.[qk]_norm": OnHeads(),
        "*.self_attn.*_layernorm": OnHeads(),
        **{f"*.self_attn.{out}": Row(unit=dim) for out in ("o_proj", "dense", "out_proj")},
        "*.mlp.gate_proj": Column(group="gate_up"),
        "*.mlp.up_proj": Column(group="gate_up"),
        "*.mlp.gate_up_proj": Column(parts=2),
        "*.mlp.down_proj": Row(),
        **{f"*layers.*.{up}": Column() for up in ("mlp.c_fc", "mlp.fc1", "fc1")},
        **{f"*layers.*.{down}": Row() for down in ("mlp.c_proj", "mlp.fc2", "fc2")},
        "lm_head": Column(gather_output=True),
    }


def _olmo2_plan(config: Any) -> dict[str, Style]:
    heads, kv_heads, dim = _heads(config)
    norms = {"*.self_attn.q_norm": OnAllHeads(heads, dim), "*.self_attn.k_norm": OnAllHeads(kv_heads, dim)}
    return {**norms, **_llama_plan(config)}


def _cohere_plan(config: Any) -> dict[str, Style]:
    heads, kv_heads, _ = _heads(config)
    norms = {"*.self_attn.q_norm": OnEachHead(heads), "*.self_attn.k_norm": OnEachHead(kv_heads)}
    return {**norms, **_llama_plan(config)}


def _opt_plan(config: Any) -> dict[str, Style]:
    return {"*.self_attn": Local({"num_heads": 1}), **_llama_plan(config)}


def _stablelm_plan(config: Any) -> dict[str, Style]:
    if config.qk_layernorm:
        raise ValueError(
            "parallelize does not shard a StableLM with qk_layernorm=True, which keeps the norm of each head in a "
            "module of its own. Take the layers of load_hf(path)."
        )
    return _opt_plan(config)


def _gemma_plan(config: Any) -> dict[str, Style]:
    return {**_llama_plan(config), "*embed_tokens": Vocab(scale=config.hidden_size**0.5)}


def _phi3_plan(config: Any) -> dict[str, Style]:
    heads, kv_heads, dim = _heads(config)
    counts = {"num_key_value_heads": 1, "config.num_attention_heads": 1}
    return {
        "*embed_tokens": Vocab(),
        "*.self_attn": Local(counts),
        "*.self_attn.qkv_proj": FusedHeads(heads, kv_heads, dim, grouped=False),
        "*.self_attn.o_proj": Row(unit=dim),
        "*.mlp.gate_up_proj": Column(parts=2),
        "*.mlp.down_proj": Row(),
        "lm_head": Column(gather_output=True),
    }


def _gptj_plan(config: Any) -> dict[str, Style]:
    """Return the plan of GPT-J and of GPT-Neo, whose attention lies one module deeper."""
    dim = config.hidden_size // config.num_attention_heads
    deeper = config.model_type == "gpt_neo"
    attention, count = ("*.attn.attention", "num_heads") if deeper else ("*.attn", "num_attention_heads")
    return {
        "*wte": Vocab(),
        attention: Local({count: 1}),
        "*.[qkv]_proj": Column(unit=dim, group="qkv"),
        "*.out_proj": Row(unit=dim),
        **{f"*.mlp.{up}": Column() for up in ("fc_in", "c_fc")},
        **{f"*.mlp.{down}": Row() for down in ("fc_out", "c_proj")},
        "lm_head": Column(gather_output=True),
    }


def _neox_plan(config: Any) -> dict[str, Style]:
    _, _, dim = _heads(config)
    return {
        "*embed_in": Vocab(),
        "*.attention.query_key_value": Column(unit=3 * dim),
        "*.attention.dense": Row(unit=dim),
        "*.mlp.dense_h_to_4h": Column(),
        "*.mlp.dense_4h_to_h": Row(),
        "lm_head": Column(gather_output=True),
    }


def _falcon_plan(config: Any) -> dict[str, Style]:
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    if config.alibi:
        raise ValueError(
            "parallelize does not shard a Falcon with alibi=True, whose position biases are made for all heads. Take "
            "the layers of load_hf(path)."
        )
    kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
    counts = {"num_heads": 1} | ({} if kv_heads == 1 else {"num_kv_heads": 1})
    return {
        "*word_embeddings": Vocab(),
        "*.self_attention": Local(counts),
        "*.self_attention.query_key_value": FusedHeads(heads, kv_heads, dim),
        "*.self_attention.dense": Row(unit=dim),
        "*.mlp.dense_h_to_4h": Column(),
        "*.mlp.dense_4h_to_h": Row(),
        "lm_head": Column(gather_output=True),
    }


def _bert_plan(config: Any) -> dict[str, Style]:
    """Return the plan of BERT and RoBERTa, which differ in the names of their heads."""
    dim = config.hidden_size // config.num_attention_heads
    return {
        "*embeddings.word_embeddings": Vocab(),
        "*attention.self": Local({"num_attention_heads": 1, "all_head_size": dim}),
        # Across, queries and keys come from different inputs.
        **{f"*.crossattention.self.{part}": Column(unit=dim) for part in ("query", "key", "value")},
        **{f"*.attention.self.{part}": Column(unit=dim, group="qkv") for part in ("query", "key", "value")},
        "*attention.output.dense": Row(unit=dim),
        "*.intermediate.dense": Column(),
        "*.output.dense": Row(),
        "cls.predictions.decoder": Column(gather_output=True),
        "lm_head.decoder": Column(gather_output=True),
    }


def _t5_plan(config: Any) -> dict[str, Style]:
    dim = config.d_kv
    counts = Local({"n_heads": 1, "inner_dim": dim})
    return {
        "*shared": Vocab(),
        "*embed_tokens": Vocab(),
        "*.SelfAttention": counts,
        "*.EncDecAttention": counts,
        "*.SelfAttention.[qkv]": Column(unit=dim, group="qkv"),
        "*.EncDecAttention.[qkv]": Column(unit=dim),  # queries and keys come from different inputs
        "*Attention.relative_attention_bias": Column(),
        "*Attention.o": Row(unit=dim),
        "*.wi": Column(),
        "*.wi_[01]": Column(group="wi"),
        "*.wo": Row(),
        "lm_head": Column(gather_output=True),
    }


def _vit_plan(config: Any) -> dict[str, Style]:
    dim = config.hidden_size // config.num_attention_heads
    return {
        "*.attention.[qkv]_proj": Column(unit=dim, group="qkv"),
        "*.attention.o_proj": Row(unit=dim),
        "*.mlp.fc1": Column(),
        "*.mlp.fc2": Row(),
    }


# --------------------------------------------------------------------------------------------------- the families

_ROPE = {"rope_theta": 1e4}
_LLAMA = Family("Llama", _llama_plan, LlamaConfig, _LLAMA_NAMES, _LLAMA_KEYS, only=_SILU, rope=_ROPE)


def _like(family: Family, prefix: str, **changes: Any) -> Family:
    """Return a family with another prefix that differs from a known one in some attributes; mappings are added to.

    A key with the value None is left out.
    """
    kept = {name: getattr(family, name) for name in family.__dataclass_fields__}
    for name, value in changes.items():
        if isinstance(value, Mapping) and name != "names":
            changes[name] = {key: each for key, each in {**kept[name], **value}.items() if each is not None}
    return Family(**{**kept, "prefix": prefix, **changes})


_BIASES = {"mlp_bias": ("mlp_bias", False), **_ATTENTION_BIAS}
_USE_BIAS: dict[str, Key] = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), ("use_bias", True))
_GEMMA = _like(
    _LLAMA,
    "Gemma",
    plan=_gemma_plan,
    config=DecoderConfig,
    keys={
        **_TIED,
        **_ATTENTION_BIAS,
        "num_key_value_heads": ("num_key_value_heads", 16),
        "head_dim": ("head_dim", 256),
    },
    flags={"norm": "rms_offset", "scale_embedding": True},
    only={"hidden_act": ("gelu_pytorch_tanh", "gelu_new", "gelu", "silu", "relu")},
    read=_gemma_read,
    write=_gemma_write,
)
_CAPS: dict[str, Key] = {
    "hidden_act": ("hidden_activation", "gelu_pytorch_tanh"),
    "query_pre_attn_scalar": ("query_pre_attn_scalar", 256),
}
_NEOX_KEYS: dict[str, Key] = _COMMON | {
    "hidden_act": ("hidden_act", "gelu"),
    "rms_norm_eps": ("layer_norm_eps", 1e-5),
}
_MULTIPLIERS: dict[str, Key] = {
    name: (name, 1.0) for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier")
}
_MIXTRAL = _like(
    _LLAMA,
    "Mixtral",
    plan=None,
    config=MixtralConfig,
    names=_MIXTRAL_NAMES,
    keys={
        "num_experts": "num_local_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "router_aux_loss_coef": ("router_aux_loss_coef", 0.001),
    },
    only={"router_jitter_noise": (0.0,), **_NO_BIASES},
    window="all",
)
_EXPERT_KEYS: dict[str, Key] = {"num_experts": "num_experts", "norm_topk_prob": ("norm_topk_prob", False)}
_QWEN_MOE_KEYS: dict[str, Key] = _EXPERT_KEYS | {"decoder_sparse_step": ("decoder_sparse_step", 1)}
_GLM4_MOE = _like(
    _MIXTRAL,
    "Glm4Moe",
    names=_GLM4_MOE_NAMES,
    keys={
        "num_key_value_heads": ("num_key_value_heads", 8),
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
        "num_experts": "n_routed_experts",
        "num_experts_per_tok": ("num_experts_per_tok", 8),
        "moe_intermediate_size": ("moe_intermediate_size", 1408),
        "norm_topk_prob": ("norm_topk_prob", True),
        "routed_scaling_factor": ("routed_scaling_factor", 1.0),
        "n_group": ("n_group", 1),
        "topk_group": ("topk_group", 1),
        "qkv_bias": ("attention_bias", False),
        "qk_norm": ("use_qk_norm", False),
        "router_aux_loss_coef": None,
    },
    flags={"scoring_func": "sigmoid", "selection_bias": True, "router_aux_loss_coef": 0.0},
    only={"router_jitter_noise": None, "attention_bias": None},
    rope={"partial_rotary_factor": 0.5},
    window="",
    read=_glm4_moe_read(1, 1, 1408),
    write=lambda config: {**_glm4_moe_write(config), "num_nextn_predict_layers": 0},
)
_DEEPSEEK_KEYS: dict[str, Key] = {"q_lora_rank": ("q_lora_rank", 1536)} | {
    name: name
    for name in (
        *(
            "moe_intermediate_size",
            "n_routed_experts",
            "n_shared_experts",
            "num_experts_per_tok",
            "routed_scaling_factor",
        ),
        *("first_k_dense_replace", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    )
}
_DEEPSEEK = Family(
    "DeepseekV2",
    None,
    DeepseekConfig,
    _DEEPSEEK_NAMES,
    _COMMON | _DEEPSEEK_KEYS | {"rms_norm_eps": ("rms_norm_eps", 1e-6), "aux_loss_alpha": ("aux_loss_alpha", 0.0)},
    {"scoring_func": "softmax", "norm_topk_prob": False, "rope_interleave": True},
    {
        **_SILU,
        **_NO_BIASES,
        "mlp_bias": (False,),
        "scoring_func": ("softmax",),
        "seq_aux": (True,),
        "moe_layer_freq": (1,),
        "quantization_config": (None,),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False, None),  # transformers takes no notice of it
    },
    _ROPE,
    ("yarn",),
    read=_deepseek_v2_read,
    write=_deepseek_v2_write,
)
_DEEPSEEK_V3 = _like(
    _DEEPSEEK,
    "DeepseekV3",
    names=_deepseek_v3_names,
    keys={
        "norm_topk_prob": ("norm_topk_prob", True),
        "n_group": ("n_group", 8),
        "topk_group": ("topk_group", 4),
        "rope_interleave": ("rope_interleave", True),
        "num_nextn_predict_layers": ("num_nextn_predict_layers", 0),
    },
    flags={"scoring_func": "sigmoid"},
    only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "norm_topk_prob": (True, False)},
    read=None,
    write=_deepseek_v3_write,
)

_QWEN2 = _like(
    _LLAMA,
    "Qwen2",
    keys={"num_key_value_heads": ("num_key_value_heads", 32)},
    flags={"qkv_bias": True},
    window="flag types",
    window_size=4096,
    slides=lambda config, block: block >= config.get("max_window_layers", 28),
)

_OLMO2 = _like(
    _LLAMA,
    "Olmo2",
    plan=_olmo2_plan,
    config=DecoderConfig,
    names=_OLMO2_NAMES,
    keys={"rms_norm_eps": ("rms_norm_eps", 1e-5), **_ATTENTION_BIAS},
    flags={"norm_place": "after", "qk_norm_all_heads": True},
)

_GLM = _like(
    _LLAMA,
    "Glm",
    config=DecoderConfig,
    names=_GLM_NAMES,
    keys={
        **_HIDDEN_ACT,
        "num_key_value_heads": ("num_key_value_heads", 2),
        "head_dim": ("head_dim", 128),
        "rms_norm_eps": ("rms_norm_eps", 1.5625e-7),
        "qkv_bias": ("attention_bias", True),
    },
    flags={"rope_interleave": True},
    only=_ANY_ACT,
    rope={"partial_rotary_factor": 0.5},
)
_LAYER_NORM_EPS: dict[str, Key] = {"rms_norm_eps": ("layer_norm_eps", 1e-5)}
_COHERE = _like(
    _LLAMA,
    "Cohere",
    plan=_cohere_plan,
    config=DecoderConfig,
    keys={
        **_TIED,
        **_HIDDEN_ACT,
        **_LAYER_NORM_EPS,
        **_ATTENTION_BIAS,
        "logit_scale": ("logit_scale", 0.0625),
        "qk_norm_per_head": ("use_qk_norm", False),
    },
    flags={"norm": "layer_weight", "parallel_residual": True, "shared_norm": True, "rope_interleave": True},
    only=_ANY_ACT,
    rope={"rope_theta": 5e5},
)

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2",
        _gpt2_plan,
        GPTConfig,
        _GPT2_NAMES,
        {
            **_GPT2_SIZES,
            "dropout": ("resid_pdrop", 0.1),
            "tie_word_embeddings": ("tie_word_embeddings", True),
            "initializer_range": ("initializer_range", 0.02),
            "layer_norm_epsilon": ("layer_norm_epsilon", 1e-5),
        },
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        read=_gpt2_read,
        write=_gpt2_write,
        aliases=_GPT2_ALIASES,
        embedding_dropout="embd_pdrop",
    ),
    "llama": _like(_LLAMA, "Llama", keys=_BIASES),
    "mistral": _like(
        _LLAMA, "Mistral", keys={"num_key_value_heads": ("num_key_value_heads", 8)}, window="all", window_size=4096
    ),
    "ministral": _like(
        _LLAMA,
        "Ministral",
        keys={"num_key_value_heads": ("num_key_value_heads", 8)},
        window="types",
        window_size=4096,
    ),
    "ministral3": _like(
        _LLAMA,
        "Ministral3",
        keys={
            "num_key_value_heads": ("num_key_value_heads", 8),
            "head_dim": ("head_dim", 128),
            "rms_norm_eps": ("rms_norm_eps", 1e-5),
        },
        rope={"llama_4_scaling_beta": 0.0},
        scalings=("yarn",),
        default_rope={"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0}
        | {"original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0}
        | {"llama_4_scaling_beta": 0.1},
        window="all",
    ),
    "internlm3": _like(
        _LLAMA,
        "Llama",  # transformers' Llama runs it
        keys={
            "num_key_value_heads": ("num_key_value_heads", 2),
            "head_dim": ("head_dim", 128),
            "rms_norm_eps": ("rms_norm_eps", 1e-5),
        },
        read=_internlm3_read,
        write=_internlm3_write,
    ),
    "qwen2": _QWEN2,
    "qwen3": _like(
        _QWEN2,
        "Qwen3",
        keys={**_ATTENTION_BIAS, "head_dim": ("head_dim", 128)},
        flags={"qkv_bias": None, "qk_norm": True},
    ),
    "smollm3": _like(
        _LLAMA,
        "SmolLM3",
        keys={**_BIASES, **_TIED, "num_key_value_heads": ("num_key_value_heads", 4)},
        rope={"rope_theta": 2e6},
        window="flag types",
        slides=lambda config, block: not _smollm3_read(config)["no_rope_layers"][block],
        read=_smollm3_read,
        write=_smollm3_write,
    ),
    "phi3": _like(
        _LLAMA,
        "Phi3",
        plan=_phi3_plan,
        config=DecoderConfig,
        names=_PHI3_NAMES,
        keys={"rms_norm_eps": ("rms_norm_eps", 1e-5), "dropout": ("resid_pdrop", 0.0)},
        rope={"partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096},
        scalings=("longrope",),
        window="all",
    ),
    "olmo2": _OLMO2,
    "olmo3": _like(
        _OLMO2,
        "Olmo3",
        rope={"rope_theta": 5e5, "rope_local_base_freq": 5e5},
        window="types",
        window_size=4096,
        slides=lambda config, block: (block + 1) % 4 != 0,
    ),
    "exaone4": _like(
        _OLMO2,
        "Exaone4",
        plan=_llama_plan,
        keys={"num_key_value_heads": ("num_key_value_heads", 32), "qkv_bias": None, "out_bias": None},
        flags={"qk_norm_all_heads": None, "qk_norm": True},
        window="types",
        window_size=4096,
        slides=_exaone4_slides,
        read=_exaone4_read,
        write=_exaone4_write,
    ),
    "arcee": _like(
        _LLAMA,
        "Arcee",
        config=DecoderConfig,
        names=_ARCEE_NAMES,
        keys={**_BIASES, "rms_norm_eps": ("rms_norm_eps", 1e-5), "hidden_act": ("hidden_act", "relu2")},
        flags={"gated": False},
        only={"hidden_act": ("relu2", "relu", "silu", "gelu", "gelu_new", "gelu_pytorch_tanh")},
    ),
    "starcoder2": _like(
        _LLAMA,
        "Starcoder2",
        config=DecoderConfig,
        names=_STARCODER2_NAMES,
        keys={
            **_TIED,
            **_USE_BIAS,
            "rms_norm_eps": ("norm_epsilon", 1e-5),
            "initializer_range": ("initializer_range", 0.018042),
            "num_key_value_heads": ("num_key_value_heads", 2),
            "hidden_act": ("hidden_act", "gelu_pytorch_tanh"),
            "dropout": ("residual_dropout", 0.0),
        },
        flags=_LAYER_NORM,
        only={"hidden_act": ("gelu_pytorch_tanh", "gelu_new", "gelu", "silu", "relu")},
        window="all",
        embedding_dropout="embedding_dropout",
    ),
    "granite": _like(
        _LLAMA,
        "Granite",
        config=DecoderConfig,
        keys={
            **_BIASES,
            **_HIDDEN_ACT,
            **_MULTIPLIERS,
            "logit_scale": ("logits_scaling", 1.0),
        },
        only=_ANY_ACT,
        inverse=("logit_scale",),
    ),
    "hyperclovax": _like(
        _LLAMA,
        "HyperCLOVAX",
        config=DecoderConfig,
        names=_HYPERCLOVA_NAMES,
        keys={
            **_BIASES,
            **_HIDDEN_ACT,
            **{f"{name}_multiplier": (f"{name}_multiplier", 1.0) for name in ("embedding", "residual")},
            "attention_multiplier": ("attention_multiplier", None),
            "logit_scale": ("logits_scaling", 1.0),
        },
        only=_ANY_ACT,
        read=_hyperclova_read,
        write=_hyperclova_write,
    ),
    "cohere": _COHERE,
    "cohere2": _like(
        _COHERE,
        "Cohere2",
        plan=_llama_plan,
        keys={"qk_norm_per_head": None},
        rope=_ROPE,
        window="types",
        window_size=4096,
        slides=_cohere2_slides,
        read=_cohere2_read,
    ),
    "glm": _GLM,
    "glm4": _like(_GLM, "Glm4", names=_GLM4_NAMES, flags={"norm_place": "both"}),
    "ernie4_5": _like(
        _LLAMA,
        "Ernie4_5",
        config=DecoderConfig,
        keys={
            **_TIED,
            **_HIDDEN_ACT,
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), ("use_bias", False)),
            "num_key_value_heads": ("num_key_value_heads", 2),
            "head_dim": ("head_dim", 128),
            "rms_norm_eps": ("rms_norm_eps", 1e-5),
        },
        flags={"rope_interleave": True},
        only={"hidden_act": _ACTS, "attention_dropout": None},
        rope={"rope_theta": 5e5},
    ),
    "helium": _like(
        _LLAMA,
        "Helium",
        config=DecoderConfig,
        keys={
            **_HIDDEN_ACT,
            "num_key_value_heads": ("num_key_value_heads", 20),
            "head_dim": ("head_dim", 128),
            "rms_norm_eps": ("rms_norm_eps", 1e-8),
            "qkv_bias": ("attention_bias", False),
            "mlp_bias": ("mlp_bias", False),
        },
        flags={"rope_interleave": True},
        only=_ANY_ACT,
        rope={"rope_theta": 1e5},
        read=_helium_read,
    ),
    "seed_oss": _like(
        _LLAMA,
        "SeedOss",
        config=DecoderConfig,
        keys={
            **_HIDDEN_ACT,
            "num_key_value_heads": ("num_key_value_heads", 8),
            "head_dim": ("head_dim", 128),
            "qkv_bias": ("attention_bias", True),
            "out_bias": ("attention_out_bias", False),
            "mlp_bias": ("mlp_bias", False),
            "dropout": ("residual_dropout", 0.1),
        },
        only={"hidden_act": _ACTS, "attention_dropout": None},
        write=_seed_oss_write,
    ),
    "stablelm": _like(
        _LLAMA,
        "StableLm",
        plan=_stablelm_plan,
        config=DecoderConfig,
        names=_STABLELM_NAMES,
        keys={
            **_HIDDEN_ACT,
            **_LAYER_NORM_EPS,
            "num_key_value_heads": ("num_key_value_heads", 32),
            "head_dim": None,
            "qkv_bias": ("use_qkv_bias", False),
            "qk_norm_per_head": ("qk_layernorm", False),
            "parallel_residual": ("use_parallel_residual", False),
            "dropout": ("hidden_dropout", 0.0),
        },
        flags={"norm": "layer"},
        only=_ANY_ACT,
        rope={"partial_rotary_factor": 0.25},
        read=_stablelm_read,
    ),
    "nemotron": _like(
        _LLAMA,
        "Nemotron",
        config=DecoderConfig,
        names=_ARCEE_NAMES,
        keys={
            **_BIASES,
            "hidden_act": ("hidden_act", "relu2"),
            "rms_norm_eps": ("norm_eps", 1e-5),
            "initializer_range": ("initializer_range", 0.0134),
        },
        flags={"norm": "layer_offset", "gated": False},
        only={"hidden_act": ("relu2", *_ACTS[:-1])},
        rope={"partial_rotary_factor": 0.5},
    ),
    "jais2": _like(
        _LLAMA,
        "Jais2",
        config=DecoderConfig,
        names=_ARCEE_NAMES,
        keys={
            **_LAYER_NORM_EPS,
            **dict.fromkeys(("qkv_bias", "out_bias"), ("attention_bias", True)),
            "mlp_bias": ("mlp_bias", True),
            "hidden_act": ("hidden_act", "relu2"),
        },
        flags=_LAYER_NORM,
        only={"hidden_act": ("relu2", *_ACTS[:-1])},
    ),
    "nanochat": _like(
        _LLAMA,
        "NanoChat",
        config=DecoderConfig,
        names=_NANOCHAT_NAMES,
        keys={
            **_ATTENTION_BIAS,
            "hidden_act": ("hidden_act", "relu2"),
            "final_logit_softcapping": ("final_logit_softcapping", 15.0),
        },
        flags={"norm": "rms_plain", "qk_norm": True, "qk_norm_after": True, "gated": False}
        | {"embedding_norm": True, "rope_reversed": True},
        only={"hidden_act": ("relu2", *_ACTS[:-1])},
    ),
    "hunyuan_v1_dense": _like(
        _LLAMA,
        "HunYuanDenseV1",
        config=DecoderConfig,
        names=_HUNYUAN_NAMES,
        keys={**_ATTENTION_BIAS, **_HIDDEN_ACT, "rms_norm_eps": ("rms_norm_eps", 1e-5)},
        flags={"qk_norm": True, "qk_norm_after": True},
        only=_ANY_ACT,
        read=_hunyuan_read,
    ),
    "olmo": _like(
        _LLAMA,
        "Olmo",
        config=DecoderConfig,
        keys={
            **_ATTENTION_BIAS,
            **_HIDDEN_ACT,
            "rms_norm_eps": None,
            "clip_qkv": ("clip_qkv", None),
        },
        flags={"norm": "layer_plain", "rms_norm_eps": 1e-5},
        only=_ANY_ACT,
    ),
    "gemma": _GEMMA,
    "gemma2": _like(
        _GEMMA,
        "Gemma2",
        names=_GEMMA2_NAMES,
        keys={
            **_CAPS,
            "num_key_value_heads": ("num_key_value_heads", 4),
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        flags={"norm_place": "both"},
        window="types",
        window_size=4096,
        slides=lambda config, block: bool((block + 1) % 2),
        read=None,
        write=None,
    ),
    "vaultgemma": _like(
        _GEMMA,
        "VaultGemma",
        names=_VAULTGEMMA_NAMES,
        keys={
            **_CAPS,
            "num_key_value_heads": ("num_key_value_heads", 4),
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        window="types",
        window_size=4096,
        slides=lambda config, block: bool((block + 1) % 2),
        read=None,
        write=None,
    ),
    "gemma3_text": _like(
        _GEMMA,
        "Gemma3",
        names=_GEMMA2_NAMES,
        keys={
            **_CAPS,
            "vocab_size": ("vocab_size", 262_208),
            "max_position_embeddings": ("max_position_embeddings", 131_072),
            "hidden_size": ("hidden_size", 2304),
            "intermediate_size": ("intermediate_size", 9216),
            "num_attention_heads": ("num_attention_heads", 8),
            "num_key_value_heads": ("num_key_value_heads", 4),
            "final_logit_softcapping": ("final_logit_softcapping", None),
        },
        flags={"norm_place": "both", "qk_norm": True},
        only={"use_bidirectional_attention": (False, None), "attn_logit_softcapping": (None,)},
        rope={"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        window="types",
        window_size=4096,
        slides=lambda config, block: bool((block + 1) % _count(config, "sliding_window_pattern", 6, 1)),
        read=None,
        write=None,
    ),
    "gpt_neox": Family(
        "GPTNeoX",
        _neox_plan,
        DecoderConfig,
        _NEOX_NAMES,
        {
            **_NEOX_KEYS,
            "dropout": ("hidden_dropout", 0.0),
            "parallel_residual": ("use_parallel_residual", True),
            "qkv_bias": ("attention_bias", True),
            "out_bias": ("attention_bias", True),
        },
        {**_LAYER_NORM, "mlp_bias": True},
        _NO_DROPOUT,
        {**_ROPE, "partial_rotary_factor": 0.25, "rotary_emb_base": 1e4, "rotary_pct": 0.25},
        embedding_dropout="hidden_dropout",
    ),
    "gptj": Family(
        "GPTJ",
        _gptj_plan,
        DecoderConfig,
        _GPTJ_NAMES,
        {
            **_GPT2_SIZES,
            "tie_word_embeddings": ("tie_word_embeddings", False),
            "initializer_range": ("initializer_range", 0.02),
            "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
            "hidden_act": ("activation_function", "gelu_new"),
            "dropout": ("resid_pdrop", 0.0),
        },
        {**_LAYER_NORM, "parallel_residual": True, "shared_norm": True, "head_bias": True, "mlp_bias": True}
        | {"rope_interleave": True},
        {"attn_pdrop": (0.0, None)},
        aliases=_GPT2_ALIASES,
        read=_gptj_read,
        write=_gptj_write,
        embedding_dropout="embd_pdrop",
    ),
    "gpt_neo": Family(
        "GPTNeo",
        _gptj_plan,
        DecoderConfig,
        _GPT_NEO_NAMES,
        {
            **{name: name for name in ("vocab_size", "max_position_embeddings", "hidden_size")},
            **_TIED,
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "initializer_range": ("initializer_range", 0.02),
            "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
            "hidden_act": ("activation_function", "gelu_new"),
            "dropout": ("resid_dropout", 0.0),
            "sliding_window": ("window_size", 256),
        },
        {**_LAYER_NORM, "learned_positions": True, "out_bias": True, "mlp_bias": True, "attention_multiplier": 1.0},
        _NO_DROPOUT,
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        read=_gpt_neo_read,
        write=_gpt_neo_write,
        embedding_dropout="embed_dropout",
    ),
    "bloom": Family(
        "Bloom",
        None,
        DecoderConfig,
        _BLOOM_NAMES,
        {
            **_TIED,
            "vocab_size": "vocab_size",
            "hidden_size": ("hidden_size", 64),
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": ("seq_length", 2048),
            "initializer_range": ("initializer_range", 0.02),
            "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
            "dropout": ("hidden_dropout", 0.0),
        },
        {**_LAYER_NORM, "embedding_norm": True, "alibi": "added", "hidden_act": "gelu_bloom"}
        | {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
        {**_NO_DROPOUT, "apply_residual_connection_post_layernorm": (False,)},
        aliases={"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "n_embed": "hidden_size"},
        read=_bloom_read,
    ),
    "phi": Family(
        "Phi",
        _llama_plan,
        DecoderConfig,
        _PHI_NAMES,
        {
            **_NEOX_KEYS,
            "num_key_value_heads": ("num_key_value_heads", 0),
            "hidden_act": ("hidden_act", "gelu_new"),
            "dropout": ("resid_pdrop", 0.0),
        },
        {**_LAYER_NORM, "parallel_residual": True, "shared_norm": True, "head_bias": True}
        | {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
        {**_NO_DROPOUT, "qk_layernorm": (False,)},
        {**_ROPE, "partial_rotary_factor": 0.5},
        embedding_dropout="embd_pdrop",
    ),
    "opt": Family(
        "OPT",
        _opt_plan,
        DecoderConfig,
        _opt_names,
        {
            **{name: name for name in _SIZES},
            **_TIED,
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), ("enable_bias", True)),
            "intermediate_size": "ffn_dim",
            "hidden_act": ("activation_function", "relu"),
            "initializer_range": ("init_std", 0.02),
            "dropout": ("dropout", 0.1),
        },
        {**_LAYER_NORM, "learned_positions": True, "position_offset": 2, "rms_norm_eps": 1e-5},
        {
            **_NO_DROPOUT,
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
            "layerdrop": (0.0,),
        },
        read=_opt_read,
        write=_opt_write,
    ),
    "falcon": Family(
        "Falcon",
        _falcon_plan,
        DecoderConfig,
        _falcon_names,
        {
            **{name: name for name in _SIZES if name != "max_position_embeddings"},
            **_TIED,
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), ("bias", False)),
            "max_position_embeddings": ("max_position_embeddings", 2048),
            "initializer_range": ("initializer_range", 0.02),
            "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
            "hidden_act": ("activation", "gelu"),
            "dropout": ("hidden_dropout", 0.0),
        },
        _LAYER_NORM,
        {**_NO_DROPOUT, "alibi": (False, None, True)},
        _ROPE,
        read=_falcon_read,
        write=_falcon_write,
    ),
    "mixtral": _like(
        _MIXTRAL,
        "Mixtral",
        keys={"rms_norm_eps": ("rms_norm_eps", 1e-5), "num_key_value_heads": ("num_key_value_heads", 8)},
        rope={"rope_theta": 1e6},
        flags={"norm_topk_prob": True},
    ),
    "qwen2_moe": _like(
        _MIXTRAL,
        "Qwen2Moe",
        names=_QWEN2_MOE_NAMES,
        keys={
            **_QWEN_MOE_KEYS,
            "num_key_value_heads": ("num_key_value_heads", 16),
            "moe_intermediate_size": ("moe_intermediate_size", 1408),
            "shared_expert_intermediate_size": ("shared_expert_intermediate_size", 5632),
            "qkv_bias": ("qkv_bias", True),
        },
        flags={"shared_expert_gate": True},
        window="flag types",
        window_size=4096,
        slides=lambda config, block: block % 2 == 0 and block < config.get("max_window_layers", 28),
        only={"attention_bias": None},
        read=_mixtral_read,
        write=_qwen3_moe_write,
    ),
    "qwen3_next": _like(
        _MIXTRAL,
        "Qwen3Next",
        names=hybrids.qwen_names(_QWEN2_MOE_NAMES, fused=True),
        keys={
            **_QWEN_MOE_KEYS,
            **_ATTENTION_BIAS,
            "norm_topk_prob": ("norm_topk_prob", True),
            "num_key_value_heads": ("num_key_value_heads", 2),
            "head_dim": ("head_dim", 256),
            "moe_intermediate_size": ("moe_intermediate_size", 512),
            "shared_expert_intermediate_size": ("shared_expert_intermediate_size", 512),
        },
        flags={"norm": "rms_offset", "qk_norm": True, "attn_output_gate": True, "shared_expert_gate": True},
        only={"attention_bias": None, "router_jitter_noise": None},
        rope={"partial_rotary_factor": 0.25},
        scalings=(),
        window="",
        read=_qwen3_next_read,
        write=_qwen3_next_write,
        blocks=False,
    ),
    "qwen3_moe": _like(
        _MIXTRAL,
        "Qwen3Moe",
        names=_EXPERT_NAMES,
        keys={
            **_QWEN_MOE_KEYS,
            "num_key_value_heads": ("num_key_value_heads", 4),
            "moe_intermediate_size": ("moe_intermediate_size", 768),
        },
        flags={"qk_norm": True},
        window="all flag",
        read=_mixtral_read,
        write=_qwen3_moe_write,
    ),
    "olmoe": _like(
        _MIXTRAL,
        "Olmoe",
        names=_EXPERT_NAMES,
        keys={
            **_EXPERT_KEYS,
            "head_dim": None,
            "rms_norm_eps": ("rms_norm_eps", 1e-5),
            "router_aux_loss_coef": ("router_aux_loss_coef", 0.01),
            "clip_qkv": ("clip_qkv", None),
        },
        flags={"qk_norm_all_heads": True},
        only={"sliding_window": (None,)},
        window="",
    ),
    "qwen3_5_text": _like(
        _LLAMA,
        "Qwen3_5",
        plan=None,
        blocks=False,
        config=DecoderConfig,
        names=hybrids.qwen_names(_LLAMA_NAMES, fused=False),
        keys={
            **_ATTENTION_BIAS,
            "num_key_value_heads": ("num_key_value_heads", 4),
            "head_dim": ("head_dim", 256),
        },
        flags={"norm": "rms_offset", "qk_norm": True, "attn_output_gate": True},
        rope={"partial_rotary_factor": 0.25},
        scalings=(),
        read=hybrids.qwen_read,
        write=hybrids.qwen_write,
    ),
    "olmo_hybrid": _like(
        _OLMO2,
        "OlmoHybrid",
        plan=None,
        blocks=False,
        names=hybrids.olmo_names({**_LLAMA_ENDS, **_ATTENTION, **_GATED}),
        keys={"rms_norm_eps": ("rms_norm_eps", 1e-6)},
        flags={"norm_place": "after_attention"},
        read=hybrids.olmo_read,
        write=hybrids.olmo_write,
    ),
    "nemotron_h": Family(
        "NemotronH",
        config=DecoderConfig,
        names=hybrids.nemotron_names,
        keys={
            **{ours: key for ours, key in _COMMON.items() if ours != "num_hidden_layers"},
            "num_key_value_heads": ("num_key_value_heads", 8),
            "head_dim": ("head_dim", 128),
            "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
            "hidden_act": ("mlp_hidden_act", "relu2"),
            "mlp_bias": ("mlp_bias", False),
        },
        flags={"gated": False, "one_branch": True},
        only={
            **_NO_DROPOUT,
            "mamba_hidden_act": ("silu",),
            "num_nextn_predict_layers": (0,),
        },
        read=hybrids.nemotron_read,
        write=hybrids.nemotron_write,
        blocks=False,
    ),
    "bamba": _like(
        _LLAMA,
        "Bamba",
        plan=None,
        blocks=False,
        config=DecoderConfig,
        names=hybrids.bamba_names(_BAMBA_NAMES),
        keys={
            **_BIASES,
            "num_key_value_heads": ("num_key_value_heads", 8),
            "head_dim": None,
            "rms_norm_eps": ("rms_norm_eps", 1e-5),
        },
        rope={"partial_rotary_factor": 0.5},
        scalings=(),
        read=hybrids.bamba_read,
        write=hybrids.bamba_write,
    ),
    "mamba2": Family(
        "Mamba2",
        config=DecoderConfig,
        names=hybrids.mamba2_names,
        keys={
            **{name: name for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
            "tie_word_embeddings": ("tie_word_embeddings", False),
            "initializer_range": ("initializer_range", 0.1),
            "rms_norm_eps": ("layer_norm_epsilon", 1e-5),
        },
        flags={"one_branch": True},
        only={"hidden_act": ("silu",)},
        read=hybrids.mamba2_read,
        write=hybrids.mamba2_write,
        blocks=False,
    ),
    "gpt_oss": _like(
        _MIXTRAL,
        "GptOss",
        names=_GPT_OSS_NAMES,
        keys={
            "num_key_value_heads": ("num_key_value_heads", 8),
            "head_dim": ("head_dim", 64),
            "rms_norm_eps": ("rms_norm_eps", 1e-5),
            "qkv_bias": ("attention_bias", True),
            "out_bias": ("attention_bias", True),
            "swiglu_limit": ("swiglu_limit", 7.0),
            "swiglu_alpha": ("swiglu_alpha", 1.702),
        },
        flags={"attention_sinks": True, "moe_bias": True, "norm_topk_prob": True},
        only={"attention_bias": None, "router_jitter_noise": None},
        rope={"rope_theta": 1.5e5},
        scaled={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        window="types",
        window_size=128,
        slides=lambda config, block: block % 2 == 0,
        read=_gpt_oss_read,
    ),
    "glm4_moe": _GLM4_MOE,
    "dots1": _like(
        _GLM4_MOE,
        "Dots1",
        keys={
            **_ATTENTION_BIAS,
            "num_key_value_heads": ("num_key_value_heads", 32),
            "rms_norm_eps": ("rms_norm_eps", 1e-6),
            "num_experts_per_tok": "num_experts_per_tok",
            "norm_topk_prob": ("norm_topk_prob", False),
            "qk_norm": None,
        },
        flags={"qk_norm": True},
        rope={"partial_rotary_factor": None},
        window="types",
        window_size=4096,
        slides=lambda config, block: block >= _count(config, "max_window_layers", 62),
        read=_glm4_moe_read(0, None, 1408),
        write=_glm4_moe_write,
    ),
    "solar_open": _like(
        _GLM4_MOE,
        "SolarOpen",
        keys={
            **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), ("moe_intermediate_size", 1280)),
            "head_dim": ("head_dim", 128),
            "qk_norm": None,
        },
        rope={"rope_theta": 1e6, "partial_rotary_factor": None},
        read=_solar_read,
        write=lambda config: {
            "n_shared_experts": config.shared_expert_intermediate_size // config.moe_intermediate_size
        },
    ),
    "exaone_moe": _like(
        _GLM4_MOE,
        "ExaoneMoe",
        names=_EXAONE_MOE_NAMES,
        keys={
            "num_key_value_heads": ("num_key_value_heads", 32),
            "num_experts": "num_experts",
            "moe_intermediate_size": ("moe_intermediate_size", 1024),
            "routed_scaling_factor": ("routed_scaling_factor", 2.5),
            "qkv_bias": None,
            "qk_norm": None,
        },
        flags={"qk_norm": True},
        rope={"partial_rotary_factor": None},
        window="types",
        window_size=4096,
        slides=_exaone4_slides,
        read=_exaone_moe_read,
        write=_exaone_moe_write,
    ),
    "minimax_m2": _like(
        _MIXTRAL,
        "MiniMaxM2",
        names=_MINIMAX_NAMES,
        keys={
            "num_key_value_heads": ("num_key_value_heads", 8),
            "head_dim": ("head_dim", 128),
            "num_experts_per_tok": ("num_experts_per_tok", 8),
            "router_aux_loss_coef": None,
        },
        # transformers' loss, which only output_router_logits switches on, is that of a softmax beside the sigmoids.
        flags={"scoring_func": "sigmoid", "selection_bias": True, "router_aux_loss_coef": 0.0}
        | {"qk_norm_all_heads": True},
        only={"attention_bias": None, "output_router_logits": (False, None)},
        rope={"rope_theta": 5e6, "partial_rotary_factor": 1.0},
        window="",
        read=_minimax_read,
    ),
    "ernie4_5_moe": _like(
        _MIXTRAL,
        "Ernie4_5_Moe",
        names=_ERNIE_MOE_NAMES,
        keys={
            **_TIED,
            "num_key_value_heads": ("num_key_value_heads", 4),
            "rms_norm_eps": ("rms_norm_eps", 1e-5),
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": ("moe_k", 6),
            "moe_intermediate_size": ("moe_intermediate_size", 1536),
            "router_aux_loss_coef": None,
        },
        # transformers' loss, which only output_router_logits switches on, is that of a choice without the bias.
        flags={"selection_bias": True, "rope_interleave": True, "router_aux_loss_coef": 0.0},
        only={"router_jitter_noise": None, "attention_bias": None, "output_router_logits": (False, None)}
        | {"use_bias": (False, None), "moe_norm_min": (1e-12,)},
        rope={"rope_theta": 5e5},
        window="",
        read=_ernie_moe_read,
        write=_ernie_moe_write,
    ),
    "llama4_text": _like(
        _MIXTRAL,
        "Llama4",
        names=_LLAMA4_NAMES,
        keys={
            **_ATTENTION_BIAS,
            "num_key_value_heads": ("num_key_value_heads", 8),
            "head_dim": ("head_dim", 128),
            "rms_norm_eps": ("rms_norm_eps", 1e-5),
            "intermediate_size": ("intermediate_size_mlp", 16384),
            **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), ("intermediate_size", 8192)),
            "num_experts_per_tok": ("num_experts_per_tok", 1),
            "attention_chunk_size": ("attention_chunk_size", 8192),
            "qk_l2_norm": ("use_qk_norm", True),
            "attn_scale": ("attn_scale", 0.1),
            "floor_scale": ("floor_scale", 8192),
            "router_aux_loss_coef": None,
        },
        flags={"scoring_func": "sigmoid", "norm_topk_prob": False, "weigh_expert_inputs": True}
        | {"rope_interleave": True, "router_aux_loss_coef": 0.0},  # transformers' model adds no such loss
        only={"attention_bias": None},
        rope={"rope_theta": 5e5},
        window="",
        read=_llama4_read,
        write=_llama4_write,
    ),
    "flex_olmo": _like(
        _MIXTRAL,
        "FlexOlmo",
        names={ours: form for ours, form in {**_EXPERT_NAMES, **_OLMO2_NAMES}.items() if ".norm" not in ours},
        keys={**_EXPERT_KEYS, **_ATTENTION_BIAS, "router_aux_loss_coef": ("router_aux_loss_coef", 0.01)}
        | {"num_experts_per_tok": ("num_experts_per_tok", 5)},
        flags={"norm_place": "after", "qk_norm_all_heads": True},
        only={"router_jitter_noise": None, "attention_bias": None},
        rope={"rope_theta": 5e5},
        window="",
    ),
    "granitemoe": _like(
        _MIXTRAL,
        "GraniteMoe",
        names=_GRANITE_MOE_NAMES,
        keys={**_ATTENTION_BIAS, **_MULTIPLIERS, "logit_scale": ("logits_scaling", 1.0)},
        flags={"norm_topk_prob": True},
        only={"router_jitter_noise": None, "attention_bias": None},
        window="",
        inverse=("logit_scale",),
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _like(_DEEPSEEK_V3, "DeepseekV3", blocks=False),  # no model of transformers has the name
    "bert": Family("Bert", _bert_plan, blocks=False),
    "roberta": Family("Roberta", _bert_plan, blocks=False),
    "t5": Family("T5", _t5_plan, blocks=False),
    "vit": Family("ViT", _vit_plan, blocks=False),
}

# Multimodal models whose language model is read alone: model_type -> that of their text_config, and the default of
# tie_word_embeddings, which stands beside it.
WRAPPERS: dict[str, tuple[str, bool]] = {"gemma3": ("gemma3_text", True)}
