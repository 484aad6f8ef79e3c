"""Description of a family of Hugging Face's models, and the keys and names that most families share: Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...tensor_parallel.plans import Style
from ..config import LlamaConfig, TransformerConfig
from .names import Names
from .sharding_plans import llama_plan

Config = Mapping[str, Any]  # content of a config.json
Key = str | tuple[str, Any] | bool | int | float
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
        keys: field of the configuration -> key of ``config.json``; or (key, its default in transformers' configuration
            class); or the default alone, of a key with the field's name. A key without a default must be there. null
            stands for 0 where the field's own default is 0.
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
        unread: beginnings of the names of tensors that a folder may have and the model lacks: those of another head.
        embedding: triax's name of the token embedding, in ``names``.
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
    embedding: str = "layers.0.weight"
    embedding_dropout: str = ""
    inverse: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @cached_property
    def places(self) -> dict[str, tuple[str, Any]]:
        """Field of the configuration -> key of ``config.json`` and its default; None: the key must be there."""
        pairs = {ours: (key, None) if isinstance(key, str) else key for ours, key in self.keys.items()}
        return {ours: pair if isinstance(pair, tuple) else (ours, pair) for ours, pair in pairs.items()}

    @property
    def architecture(self) -> str:
        """Name of the family's class of language models, as ``config.json`` lists it under ``architectures``."""
        return self.prefix + ("LMHeadModel" if self.prefix == "GPT2" else "ForCausalLM")

    @property
    def classifier(self) -> str:
        """Name of the family's class of models with a score in place of logits; empty if transformers has none."""
        return {"Olmoe": "", "Gemma3": f"Gemma3Text{CLASSIFIER}"}.get(self.prefix, self.prefix + CLASSIFIER)


SIZES = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads")
_WIDTHS: dict[str, Key] = {name: name for name in (*SIZES, "intermediate_size")}
COMMON: dict[str, Key] = _WIDTHS | {"tie_word_embeddings": False, "initializer_range": 0.02}
_LLAMA_KEYS: dict[str, Key] = COMMON | {"num_key_value_heads": 0, "head_dim": 0, "rms_norm_eps": 1e-6}
TIED: dict[str, Key] = {"tie_word_embeddings": True}
ATTENTION_BIAS: dict[str, Key] = dict.fromkeys(("qkv_bias", "out_bias"), ("attention_bias", False))
NO_DROPOUT: dict[str, tuple[Any, ...]] = {"attention_dropout": (0.0, None)}
SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), **NO_DROPOUT}


def block_names(first: int, **names: Any) -> Names:
    """Return a table of the parameters of block i, which is layer i + ``first``; ``__`` stands for a dot."""
    return {f"layers.{{i+{first}}}.{ours.replace('__', '.')}.*": theirs for ours, theirs in names.items()}


def end_names(embedding: str, norm: str, first: int = 1) -> Names:
    """Return a table of the token embedding, the final norm and the head."""
    head = {f"layers.{{n+{first + 1}}}.*": "lm_head.*"}
    return {"layers.0.weight": f"{embedding}.weight", f"layers.{{n+{first}}}.*": f"{norm}.*", **head}


AT = "model.layers.{i}"
ATTENTION = block_names(
    1,
    attention__q=f"{AT}.self_attn.q_proj.*",
    attention__kv=(f"{AT}.self_attn.k_proj.*", f"{AT}.self_attn.v_proj.*"),
    attention__q_norm=f"{AT}.self_attn.q_norm.*",
    attention__k_norm=f"{AT}.self_attn.k_norm.*",
    attention__out=f"{AT}.self_attn.o_proj.*",
)
NORMS = block_names(1, norm1=f"{AT}.input_layernorm.*", norm2=f"{AT}.post_attention_layernorm.*")
GATED = block_names(1, mlp__gate_up=(f"{AT}.mlp.gate_proj.*", f"{AT}.mlp.up_proj.*"), mlp__down=f"{AT}.mlp.down_proj.*")
LLAMA_ENDS = end_names("model.embed_tokens", "model.norm")
LLAMA_NAMES: Names = {**LLAMA_ENDS, **ATTENTION, **NORMS, **GATED}
ROPE = {"rope_theta": 1e4}
LLAMA = Family("Llama", llama_plan, LlamaConfig, LLAMA_NAMES, _LLAMA_KEYS, only=SILU, rope=ROPE)


def score_count(config: Config) -> int:
    """Return the number of scores or classes of a model, transformers' ``num_labels``."""
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, Mapping) else int(config.get("num_labels") or 2)  # its default


def like(family: Family, prefix: str, **changes: Any) -> Family:
    """Return a family with another prefix that differs from a known one in some attributes; mappings are added to.

    A key with the value None is left out.
    """
    kept = {name: getattr(family, name) for name in family.__dataclass_fields__}
    for name, value in changes.items():
        if isinstance(value, Mapping) and name != "names":
            changes[name] = {key: option for key, option in {**kept[name], **value}.items() if option is not None}
    return Family(**{**kept, "prefix": prefix, **changes})


BIASES = {"mlp_bias": False, **ATTENTION_BIAS}
