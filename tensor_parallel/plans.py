"""What ``parallelize`` can do with a module, and the plans it knows: Hugging Face's GPT-2, Llama, Qwen and BERT.

A plan is found from ``module.config.model_type`` and from what the module is made of; nothing is imported for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

__all__ = ["Column", "KeyValue", "Local", "OnHeads", "Row", "Style", "Vocab", "find_plan"]


@dataclass(frozen=True)
class Column:
    """A linear layer's outputs are sharded.

    Attributes:
        parts: layers fused along the outputs, each sharded on its own: their lengths, or the number of equal ones.
        unit: outputs that stay together: the head's dim, where they are heads.
        gather_output: return all outputs on every rank.
        group: of siblings that are always given the same input: computed together, by the first that is called, so
            that the input's gradient is reduced once.
    """

    parts: tuple[int, ...] | int | None = None
    unit: int = 1
    gather_output: bool = False
    group: str = ""


@dataclass(frozen=True)
class Row:
    """A linear layer's inputs are sharded, as a column layer of the same ``unit`` leaves them."""

    unit: int = 1


@dataclass(frozen=True)
class Vocab:
    """An embedding's rows are sharded."""


@dataclass(frozen=True)
class KeyValue:
    """The key or value projection of grouped queries (Ainslie et al. 2023, arXiv:2305.13245).

    Sharded where the tensor axis divides ``kv_heads``; else whole on every rank, which uses the heads of its queries
    (and the attention module's ``num_key_value_groups`` is set to how many queries then share one).

    Attributes:
        heads: of the queries; each group of ``heads / kv_heads`` shares a key/value head.
        kv_heads: of keys and values.
        head_dim: outputs a head.
        group: as in ``Column``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    group: str = ""


@dataclass(frozen=True)
class OnHeads:
    """A layer that is applied to each head alike, such as a norm of queries: its gradient sums over the ranks."""


@dataclass(frozen=True)
class Local:
    """Numbers that a module keeps of what is now sharded: they become this rank's share.

    Attributes:
        attributes: the attribute's name -> the unit it is shared out in, e.g. ``{"num_heads": 1, "width": head_dim}``.
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
    """Llama, Qwen2 and Qwen3, which differ in biases and in the norms of queries and keys."""
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
    """The plan of a Hugging Face model: those patterns of its family that its modules match.

    Raises:
        ValueError: the family is not known, or the module is not built as that family's models are.
    """
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", None)
    if family not in _FAMILIES:
        what = f"a {type(module).__name__}" + (f" of model_type {family!r}" if family else " without a model_type")
        raise ValueError(
            f"no plan is known for {what} (but for {', '.join(_FAMILIES)}): pass plan={{'*.up': 'column', "
            "'*.down': 'row', ...}, patterns of its modules' names"
        )
    names = [name for name, _ in module.named_modules()]
    plan = _FAMILIES[family](config)
    plan = {pattern: style for pattern, style in plan.items() if any(fnmatchcase(name, pattern) for name in names)}
    if not any(isinstance(style, Row) for style in plan.values()):
        raise ValueError(
            f"this {type(module).__name__} says that it is {family!r}, but has none of its layers: it has "
            f"{', '.join(names[1:9])}, ...; pass plan="
        )
    return plan
