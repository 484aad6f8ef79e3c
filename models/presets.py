"""Fields of published models, and of small ones for tests, by name. Without torch."""

from __future__ import annotations

from typing import Any

from .rope_scaling import RopeScaling, YarnScaling

Presets = dict[str, dict[str, Any]]


def _shape(hidden_size: int, num_hidden_layers: int, num_attention_heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers}
    return sizes | {"num_attention_heads": num_attention_heads, **others}


_BYTES: dict[str, Any] = {"vocab_size": 256}
_GPT3: dict[str, Any] = {"max_position_embeddings": 2048}

# GPT-2: Radford et al. 2019, table 2, and its released weights. GPT-3: Brown et al. 2020, arXiv:2005.14165,
# table 2.1, where two rows contradict their own width = heads x head dim: gpt3-xl has 24 heads of 128 for
# width 2048 (16 here) and gpt3-13b a width of 5140 for 40 heads of 128 (5120 here). Its even layers attend
# sparsely; all of ours attend densely. "bytes": any text as its UTF-8 bytes, no tokenizer; sizes for a
# laptop.
GPT_PRESETS: Presets = {
    "gpt2": _shape(768, 12, 12, dropout=0.1),
    "gpt2-medium": _shape(1024, 24, 16, dropout=0.1),
    "gpt2-large": _shape(1280, 36, 20, dropout=0.1),
    "gpt2-xl": _shape(1600, 48, 25, dropout=0.1),
    "gpt3-small": _shape(768, 12, 12, **_GPT3),
    "gpt3-medium": _shape(1024, 24, 16, **_GPT3),
    "gpt3-large": _shape(1536, 24, 16, **_GPT3),
    "gpt3-xl": _shape(2048, 24, 16, **_GPT3),
    "gpt3-2.7b": _shape(2560, 32, 32, **_GPT3),
    "gpt3-6.7b": _shape(4096, 32, 32, **_GPT3),
    "gpt3-13b": _shape(5120, 40, 40, **_GPT3),
    "gpt3-175b": _shape(12288, 96, 96, **_GPT3),
    "bytes-tiny": _shape(32, 2, 4, max_position_embeddings=64, **_BYTES),
    "bytes-small": _shape(128, 4, 4, max_position_embeddings=128, **_BYTES),
    "bytes-medium": _shape(256, 8, 8, max_position_embeddings=256, **_BYTES),
}

_LLAMA2: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 5e5,
}
_LLAMA31: dict[str, Any] = _LLAMA3 | {"max_position_embeddings": 131072, "rope_scaling": RopeScaling()}
_QWEN: dict[str, Any] = {"vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}

# Touvron et al. 2023, arXiv:2307.09288; Grattafiori et al. 2024, arXiv:2407.21783, table 3; Qwen2.5:
# arXiv:2412.15115, table 1; Qwen3: arXiv:2505.09388, table 1; and the configurations released with the weights.
LLAMA_PRESETS: Presets = {
    "llama2-7b": _shape(4096, 32, 32, intermediate_size=11008, **_LLAMA2),
    "llama2-13b": _shape(5120, 40, 40, intermediate_size=13824, **_LLAMA2),
    "llama2-70b": _shape(8192, 80, 64, intermediate_size=28672, num_key_value_heads=8, **_LLAMA2),
    "llama3-8b": _shape(4096, 32, 32, intermediate_size=14336, **_LLAMA3),
    "llama3-70b": _shape(8192, 80, 64, intermediate_size=28672, **_LLAMA3),
    "llama3.1-8b": _shape(4096, 32, 32, intermediate_size=14336, **_LLAMA31),
    "llama3.1-70b": _shape(8192, 80, 64, intermediate_size=28672, **_LLAMA31),
    "llama3.1-405b": _shape(16384, 126, 128, intermediate_size=53248, **_LLAMA31),
    "llama3.2-1b": _shape(2048, 16, 32, intermediate_size=8192, tie_word_embeddings=True, **_LLAMA31)
    | {"rope_scaling": RopeScaling(factor=32.0)},
    "qwen2.5-0.5b": _shape(896, 24, 14, intermediate_size=4864, num_key_value_heads=2, **_QWEN)
    | {"max_position_embeddings": 32768, "qkv_bias": True},
    "qwen3-0.6b": _shape(1024, 28, 16, intermediate_size=3072, num_key_value_heads=8, head_dim=128, **_QWEN)
    | {"max_position_embeddings": 40960, "qk_norm": True},
    "llama-tiny": _shape(32, 2, 4, intermediate_size=88, num_key_value_heads=2, max_position_embeddings=64, **_BYTES),
    "llama-small": _shape(
        128, 4, 4, intermediate_size=344, num_key_value_heads=2, max_position_embeddings=128, **_BYTES
    ),
}

_QWEN3_MOE: dict[str, Any] = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "qk_norm": True,
}

# Jiang et al. 2024, arXiv:2401.04088, table 1; Qwen3: arXiv:2505.09388, table 2; OLMoE: arXiv:2409.02060, table 10; and
# the configurations released with the weights.
MIXTRAL_PRESETS: Presets = {
    "mixtral-8x7b": _shape(4096, 32, 32, intermediate_size=14336, num_key_value_heads=8, router_aux_loss_coef=0.02)
    | {"max_position_embeddings": 32768, "rope_theta": 1e6},
    "qwen3-30b-a3b": _shape(2048, 48, 32, intermediate_size=6144, num_key_value_heads=4, head_dim=128, **_QWEN3_MOE)
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "olmoe-1b-7b": _shape(2048, 16, 16, intermediate_size=1024, vocab_size=50304, qk_norm_all_heads=True)
    | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
    "mixtral-tiny": _shape(32, 2, 4, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=64, **_BYTES)
    | {"num_experts": 4},
}

_BERT_LARGE = _shape(1024, 24, 16, intermediate_size=4096, dropout=0.1)
_ROBERTA: dict[str, Any] = {"vocab_size": 50265, "layer_norm_eps": 1e-5, "type_vocab_size": 1, "position_offset": 2}
_MODERN: dict[str, Any] = {"vocab_size": 50368, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "gated": True}
_MODERN |= {"norm_place": "embedding", "learned_positions": False, "type_vocab_size": 0}
_MODERN |= {"classifier_pooling": "mean", "sliding_window": 65, "rope_theta": 1.6e5, "rope_local_base_freq": 1e4}
_MODERN |= dict.fromkeys(("norm_bias", "head_bias", "qkv_bias", "out_bias", "mlp_bias", "pooler"), False)
_LOCAL: tuple[str, ...] = ("full_attention", "sliding_attention", "sliding_attention")
_VIT: dict[str, Any] = {"image_size": 224, "norm_place": "before", "num_labels": 1000, "pooler": False}

# Devlin et al. 2019, arXiv:1810.04805, section 3; Liu et al. 2019, arXiv:1907.11692, table 9; Warner et al. 2024,
# arXiv:2412.13663; Dosovitskiy et al. 2021, arXiv:2010.11929, table 1; and the configurations released with the
# weights. The tiny ones are for a laptop, with tokens that are bytes.
ENCODER_PRESETS: Presets = {
    "bert-base": _shape(768, 12, 12, dropout=0.1),
    "bert-large": _BERT_LARGE,
    "roberta-base": _shape(768, 12, 12, dropout=0.1, **_ROBERTA),
    "roberta-large": _BERT_LARGE | _ROBERTA,
    "modernbert-base": _shape(768, 22, 12, intermediate_size=1152, layer_types=(_LOCAL * 8)[:22], **_MODERN),
    "modernbert-large": _shape(1024, 28, 16, intermediate_size=2624, layer_types=(_LOCAL * 10)[:28], **_MODERN),
    "vit-b-16": _shape(768, 12, 12, **_VIT),
    "vit-l-16": _shape(1024, 24, 16, intermediate_size=4096, **_VIT),
    "vit-h-14": _shape(1280, 32, 16, intermediate_size=5120, patch_size=14, **_VIT),
    "encoder-tiny": _shape(32, 2, 4, intermediate_size=88, max_position_embeddings=64, **_BYTES),
    "vit-tiny": _shape(32, 2, 4, intermediate_size=88, **_VIT) | {"image_size": 8, "patch_size": 4, "num_labels": 4},
}

_T5_11: dict[str, Any] = {"hidden_act": "gelu_new", "gated": True, "tie_word_embeddings": False}
_T5_11 |= {"scale_decoder_outputs": False}

# Raffel et al. 2020, arXiv:1910.10683, section 3.7; Chung et al. 2022, arXiv:2210.11416, with the sizes of T5 v1.1;
# and the configurations released with the weights.
T5_PRESETS: Presets = {
    "t5-small": _shape(512, 6, 8, dropout=0.1),
    "t5-base": _shape(768, 12, 12, intermediate_size=3072, dropout=0.1),
    "t5-large": _shape(1024, 24, 16, intermediate_size=4096, dropout=0.1),
    "flan-t5-small": _shape(512, 8, 6, intermediate_size=1024, dropout=0.1, **_T5_11),
    "flan-t5-base": _shape(768, 12, 12, dropout=0.1, **_T5_11),
    "flan-t5-large": _shape(1024, 24, 16, intermediate_size=2816, dropout=0.1, **_T5_11),
    "t5-tiny": _shape(32, 2, 4, intermediate_size=88, head_dim=8, **_BYTES),
}

# Radford et al. 2022, arXiv:2212.04356, table 1, and the configurations released with the weights.
WHISPER_PRESETS: Presets = {
    "whisper-tiny": _shape(384, 4, 6),
    "whisper-small": _shape(768, 12, 12, intermediate_size=3072),
    "whisper-large-v3": _shape(1280, 32, 20, intermediate_size=5120, vocab_size=51866, num_mel_bins=128),
    "whisper-toy": _shape(32, 2, 4, intermediate_size=88, max_source_positions=12, max_position_embeddings=16)
    | {"num_mel_bins": 5, "decoder_start_token_id": 1, "pad_token_id": 0, **_BYTES},
}

_YARN: dict[str, Any] = {"max_position_embeddings": 163840}
_V2: dict[str, Any] = _YARN | {"rope_scaling": YarnScaling(mscale=0.707, mscale_all_dim=0.707)}

# DeepSeek-V2: arXiv:2405.04434, section 3.1.2 and appendix B; DeepSeek-V3: arXiv:2412.19437, section 4.2; and the
# configurations released with the weights.
DEEPSEEK_PRESETS: Presets = {
    "deepseek-v2-lite": _V2,
    "deepseek-v2": _shape(5120, 60, 128, intermediate_size=12288, moe_intermediate_size=1536, **_V2)
    | {"n_routed_experts": 160, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0, "q_lora_rank": 1536},
    "deepseek-v3": _shape(
        7168, 61, 128, intermediate_size=18432, moe_intermediate_size=2048, vocab_size=129280, **_YARN
    )
    | {"rope_scaling": YarnScaling(mscale=1.0, mscale_all_dim=1.0), "scoring_func": "sigmoid", "norm_topk_prob": True}
    | {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "q_lora_rank": 1536}
    | {"num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "aux_loss_alpha": 0.0001},
    "deepseek-tiny": _shape(32, 2, 4, intermediate_size=88, moe_intermediate_size=24, max_position_embeddings=64)
    | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 1}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    | {"scoring_func": "sigmoid", "norm_topk_prob": True}
    | _BYTES,
}
