"""Plans of ``parallelize``: how the modules of each family are sharded over the tensor axis."""

from __future__ import annotations

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


def _heads(config: Any) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key/value heads, and the width of a head."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def gpt2_plan(config: Any) -> dict[str, Style]:
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


def llama_plan(config: Any) -> dict[str, Style]:
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


def olmo2_plan(config: Any) -> dict[str, Style]:
    heads, kv_heads, dim = _heads(config)
    norms = {"*.self_attn.q_norm": OnAllHeads(heads, dim), "*.self_attn.k_norm": OnAllHeads(kv_heads, dim)}
    return {**norms, **llama_plan(config)}


def cohere_plan(config: Any) -> dict[str, Style]:
    heads, kv_heads, _ = _heads(config)
    norms = {"*.self_attn.q_norm": OnEachHead(heads), "*.self_attn.k_norm": OnEachHead(kv_heads)}
    return {**norms, **llama_plan(config)}


def opt_plan(config: Any) -> dict[str, Style]:
    return {"*.self_attn": Local({"num_heads": 1}), **llama_plan(config)}


def stablelm_plan(config: Any) -> dict[str, Style]:
    if config.qk_layernorm:
        raise ValueError(
            "parallelize does not shard a StableLM with qk_layernorm=True, which keeps the norm of each head in a "
            "module of its own. Take the layers of load_hf(path)."
        )
    return opt_plan(config)


def gemma_plan(config: Any) -> dict[str, Style]:
    return {**llama_plan(config), "*embed_tokens": Vocab(scale=config.hidden_size**0.5)}


def phi3_plan(config: Any) -> dict[str, Style]:
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


def gptj_plan(config: Any) -> dict[str, Style]:
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


def neox_plan(config: Any) -> dict[str, Style]:
    _, _, dim = _heads(config)
    return {
        "*embed_in": Vocab(),
        "*.attention.query_key_value": Column(unit=3 * dim),
        "*.attention.dense": Row(unit=dim),
        "*.mlp.dense_h_to_4h": Column(),
        "*.mlp.dense_4h_to_h": Row(),
        "lm_head": Column(gather_output=True),
    }


def falcon_plan(config: Any) -> dict[str, Style]:
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


def bert_plan(config: Any) -> dict[str, Style]:
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


def t5_plan(config: Any) -> dict[str, Style]:
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


def vit_plan(config: Any) -> dict[str, Style]:
    dim = config.hidden_size // config.num_attention_heads
    return {
        "*.attention.[qkv]_proj": Column(unit=dim, group="qkv"),
        "*.attention.o_proj": Row(unit=dim),
        "*.mlp.fc1": Column(),
        "*.mlp.fc2": Row(),
    }
