"""Styles in which ``parallelize`` shards a module, and plans for Hugging Face's GPT-2, Llama, Qwen and BERT.

A plan is chosen by ``module.config.model_type`` and by the names of the sub-modules, without importing transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Column:
    """Style of a linear layer whose outputs are sharded (column-parallel).

    Attributes:
        parts: lengths of the layers that are fused along the outputs, or the number of equal ones. Each of these
            layers is sharded separately.
        unit: number of consecutive outputs that stay on one rank; for attention heads, the head's width.
        gather_output: return all outputs on every rank.
        group: name of a group of sibling layers that always get the same input. The outputs of the whole group are
            computed when its first layer is called, so that the input's gradient is reduced once.
    """

    parts: tuple[int, ...] | int | None = None
    unit: int = 1
    gather_output: bool = False
    group: str = ""


@dataclass(frozen=True)
class Row:
    """Style of a linear layer whose inputs are sharded (row-parallel).

    Attributes:
        unit: number of consecutive inputs that stay on one rank, equal to ``unit`` of the ``Column`` layer in front.
    """

    unit: int = 1


@dataclass(frozen=True)
class Vocab:
    """Style of an embedding whose rows (the vocabulary) are sharded."""


@dataclass(frozen=True)
class KeyValue:
    """Style of the key or value projection of grouped queries (Ainslie et al. 2023, arXiv:2305.13245).

    The projection is sharded if the tensor axis divides ``kv_heads``. Otherwise it is replicated, and each rank
    computes only the key/value heads that its query heads use. The attention module's ``num_key_value_groups`` is then
    set to the number of this rank's query heads per key/value head.

    Attributes:
        heads: number of query heads. Each group of ``heads / kv_heads`` query heads shares a key/value head.
        kv_heads: number of key/value heads.
        head_dim: number of outputs per head.
        group: group of sibling layers, as in ``Column``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    group: str = ""


@dataclass(frozen=True)
class OnHeads:
    """Style of a replicated layer that is applied to each head, such as a norm of the queries.

    Its gradient is summed over the tensor-parallel ranks, because each rank applies the layer only to its own heads.
    """


@dataclass(frozen=True)
class Local:
    """Style of a module with attributes, such as the number of heads, that must be set to this rank's share.

    Attributes:
        attributes: attribute name -> unit in which the number is sharded, e.g. ``{"num_heads": 1, "width": head_dim}``.
    """

    attributes: Mapping[str, int]


Style = Column | Row | Vocab | KeyValue | OnHeads | Local


def _gpt2(config: Any) -> dict[str, Style]:
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


def _llama(config: Any) -> dict[str, Style]:
    """Return the plan for Llama, Qwen2 and Qwen3, which differ in biases and in the norms of queries and keys."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "*embed_tokens": Vocab(),
        "*.self_attn.q_proj": Column(unit=dim, group="qkv"),
        "*.self_attn.[kv]_proj": KeyValue(heads, kv_heads, dim, group="qkv"),
        "*.self_attn.[qk]_norm": OnHeads(),
        "*.self_attn.o_proj": Row(unit=dim),
        "*.mlp.gate_proj": Column(group="gate_up"),
        "*.mlp.up_proj": Column(group="gate_up"),
        "*.mlp.down_proj": Row(),
        "lm_head": Column(gather_output=True),
    }


def _bert(config: Any) -> dict[str, Style]:
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
    }


_FAMILIES: dict[str, Callable[[Any], dict[str, Style]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "bert": _bert,
}


def find_plan(module: nn.Module) -> dict[str, Style]:
    """Return the plan of a Hugging Face model: the patterns of its family that match at least one module.

    Raises:
        ValueError: the family is unknown, or the module lacks sub-modules that this family's models have.
    """
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", None)
    if family not in _FAMILIES:
        what = f"a {type(module).__name__}" + (f" of model_type {family!r}" if family else " without a model_type")
        raise ValueError(
            f"there is no built-in plan for {what}, only for {', '.join(_FAMILIES)}. Pass a plan of patterns of module "
            "names, such as plan={'*.up': 'column', '*.down': 'row'}."
        )
    names = [name for name, _ in module.named_modules()]
    plan = _FAMILIES[family](config)
    plan = {pattern: style for pattern, style in plan.items() if any(fnmatchcase(name, pattern) for name in names)}
    if not any(isinstance(style, Row) for style in plan.values()):
        raise ValueError(
            f"this {type(module).__name__} has the model_type {family!r}, but none of the layers of that family. Its "
            f"modules are {', '.join(names[1:9])}, .... Pass a plan of patterns of these names, plan={{...}}."
        )
    return plan
