"""transformers' options of toy models, one and more of each family that triax has layers for.

``DENSE``: case -> (the family, options). The first case of a family stands for it in the table of docs/models.md.
``HYBRIDS``: the same for hybrids of attention and recurrent layers.
``MIXTURES``: the same for mixtures of experts, with the name of transformers' classes, and ``COMMON`` options of all.
``T5``: the options of an encoder-decoder.
"""

from __future__ import annotations

from typing import Any

VOCABULARY = 61
_TOKENS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_HEADS = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 32}
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "intermediate_size": 44, **_HEADS, **_TOKENS}
_LLAMA = _SIZES | {"num_key_value_heads": 2}
_FALCON = {name: value for name, value in _SIZES.items() if name != "intermediate_size"} | {"ffn_hidden_size": 44}
_GEMMA = _LLAMA | {"head_dim": 6}
_OPT = {name: value for name, value in _SIZES.items() if name != "intermediate_size"}
_OPT |= {"ffn_dim": 44, "dropout": 0.0, "word_embed_proj_dim": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3]}
_LONG |= {"long_factor": [1.0, 2.0, 3.5, 5.0]}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
_LOCAL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_FULL_YARN = {
    "full_attention": {**_YARN, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4} | _TOKENS
_GPT_NEO = {name: value for name, value in _HEADS.items() if name not in ("num_hidden_layers", "num_attention_heads")}
_GPT_NEO |= {"vocab_size": VOCABULARY, "num_layers": 3, "num_heads": 4, "window_size": 4, **_TOKENS}
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4} | _TOKENS
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "gpt2",
        {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}
        | {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
        | _TOKENS,
    ),
    "llama": ("llama", _LLAMA),
    "llama-biases": ("llama", _LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": ("llama", _LLAMA | {"rope_parameters": _YARN}),
    "llama-linear": ("llama", _LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("mistral", _LLAMA | {"sliding_window": 4}),
    "qwen2": ("qwen2", _LLAMA),
    "qwen2-window": ("qwen2", _LLAMA | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", _LLAMA | {"head_dim": 6}),
    "qwen3-biases": ("qwen3", _LLAMA | {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", _LLAMA | {"no_rope_layer_interval": 2}),
    "smollm3-window": (
        "smollm3",
        _LLAMA | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5, "mlp_bias": True},
    ),
    "phi3": ("phi3", _LLAMA),
    "phi3-partial": (
        "phi3",
        _LLAMA
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
        | {"sliding_window": 5, "tie_word_embeddings": True},
    ),
    "phi3-longrope": ("phi3", _LLAMA | {"rope_parameters": _LONG, "original_max_position_embeddings": 24}),
    "phi3-long-rows": (
        "phi3",
        _LLAMA | {"rope_parameters": _LONG | {"attention_factor": 1.3}, "original_max_position_embeddings": 8},
    ),
    "llama-dynamic": ("llama", _LLAMA | {"rope_parameters": _DYNAMIC}),
    "llama-dynamic-long-rows": ("llama", _LLAMA | {"rope_parameters": _DYNAMIC, "max_position_embeddings": 8}),
    "olmo2": ("olmo2", _LLAMA),
    "olmo3": ("olmo3", _LLAMA | {"sliding_window": 4, "layer_types": _MIXED}),
    "olmo3-yarn": ("olmo3", _LLAMA | {"sliding_window": 4, "layer_types": _MIXED, "rope_parameters": _FULL_YARN}),
    "exaone4": ("exaone4", _LLAMA | {"sliding_window": 4, "sliding_window_pattern": 2}),
    "exaone4-global": ("exaone4", _LLAMA | {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "arcee": ("arcee", _LLAMA),
    "arcee-biases": ("arcee", _LLAMA | {"attention_bias": True, "mlp_bias": True, "rope_parameters": _YARN}),
    "starcoder2": ("starcoder2", _LLAMA | {"sliding_window": 5, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "granite": (
        "granite",
        _LLAMA
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 1.7},
    ),
    "granite-tied": (
        "granite",
        _LLAMA
        | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}
        | {"logits_scaling": 3.0, "embedding_multiplier": 0.7, "rope_parameters": _YARN},
    ),
    "cohere": ("cohere", _LLAMA),
    "cohere-norms": (
        "cohere",
        _LLAMA
        | {
            "use_qk_norm": True,
            "head_dim": 6,
            "attention_bias": True,
            "logit_scale": 1.5,
            "tie_word_embeddings": False,
        },
    ),
    "cohere2": ("cohere2", _LLAMA | {"sliding_window": 4, "layer_types": _MIXED}),
    "cohere2-pattern": (
        "cohere2",
        _LLAMA | {"sliding_window": 5, "sliding_window_pattern": 2, "attention_bias": True, "logit_scale": 2.0},
    ),
    "glm": ("glm", _LLAMA | {"head_dim": 8}),
    "glm-plain": (
        "glm",
        _LLAMA
        | {"head_dim": 6, "attention_bias": False, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "glm4": ("glm4", _LLAMA | {"head_dim": 8}),
    "ernie4_5": ("ernie4_5", _LLAMA | {"head_dim": 6}),
    "ernie4_5-biases": ("ernie4_5", _LLAMA | {"head_dim": None, "use_bias": True, "tie_word_embeddings": False}),
    "stablelm": ("stablelm", _LLAMA),
    "stablelm-one-key": ("stablelm", _LLAMA | {"num_key_value_heads": 1, "use_qkv_bias": True}),
    "stablelm-norms": (
        "stablelm",
        _LLAMA | {"qk_layernorm": True, "num_key_value_heads": 1, "use_parallel_residual": True},
    ),
    "nemotron": ("nemotron", _LLAMA),
    "nemotron-biases": (
        "nemotron",
        _LLAMA | {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "hidden_act": "silu"},
    ),
    "olmo": ("olmo", _LLAMA),
    "olmo-clipped": ("olmo", _LLAMA | {"clip_qkv": 0.5, "attention_bias": True, "tie_word_embeddings": True}),
    "ministral": ("ministral", _LLAMA | {"sliding_window": 4, "layer_types": _MIXED, "head_dim": 8}),
    "ministral-window": ("ministral", _LLAMA | {"sliding_window": 5, "head_dim": 6}),
    "ministral3": (
        "ministral3",
        _LLAMA | {"head_dim": 6, "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.7}},
    ),
    "ministral3-window": (
        "ministral3",
        _LLAMA
        | {"head_dim": 8, "sliding_window": 5, "tie_word_embeddings": True}
        | {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "internlm3": ("internlm3", _LLAMA | {"head_dim": 6}),
    "internlm3-biases": ("internlm3", _LLAMA | {"head_dim": None, "attention_bias": True, "mlp_bias": True}),
    "hyperclovax": ("hyperclovax", _LLAMA | {"attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    "hyperclovax-plain": ("hyperclovax", _LLAMA | {"use_post_norm": False, "logits_scaling": 2.5, "mlp_bias": True}),
    "helium": ("helium", _LLAMA | {"head_dim": 8}),
    "helium-biases": ("helium", _LLAMA | {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "seed_oss": ("seed_oss", _LLAMA | {"head_dim": 6, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "seed_oss-biases": (
        "seed_oss",
        _LLAMA
        | {"head_dim": None, "attention_dropout": 0.0, "residual_dropout": 0.0, "tie_word_embeddings": True}
        | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "jais2": ("jais2", _LLAMA),
    "jais2-plain": ("jais2", _LLAMA | {"attention_bias": False, "mlp_bias": False, "hidden_act": "gelu"}),
    "nanochat": ("nanochat", _LLAMA | {"final_logit_softcapping": 2.0}),
    "nanochat-uncapped": ("nanochat", _LLAMA | {"final_logit_softcapping": None, "attention_bias": True}),
    "vaultgemma": (
        "vaultgemma",
        _GEMMA
        | {"query_pre_attn_scalar": 10, "sliding_window": 5}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gptj": ("gptj", _GPT2 | {"rotary_dim": 4}),
    "gptj-gelu": ("gptj", _GPT2 | {"rotary_dim": 8, "n_inner": 44, "activation_function": "gelu"}),
    "gpt_neo": ("gpt_neo", _GPT_NEO | {"attention_types": [[["global", "local"], 1], [["local"], 1]]}),
    "gpt_neo-global": (
        "gpt_neo",
        _GPT_NEO | {"attention_types": [[["global"], 3]], "intermediate_size": 44, "tie_word_embeddings": False},
    ),
    "bloom": ("bloom", _BLOOM),
    "bloom-six-heads": ("bloom", _BLOOM | {"hidden_size": 36, "n_head": 6, "tie_word_embeddings": False}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _LLAMA | {"head_dim": 6}),
    "hunyuan_v1_dense-biases": (
        "hunyuan_v1_dense",
        _LLAMA | {"head_dim": 8, "attention_bias": True, "rope_parameters": _YARN},
    ),
    "hunyuan_v1_dense-alpha": (
        "hunyuan_v1_dense",
        _LLAMA | {"head_dim": 8, "rope_parameters": _DYNAMIC | {"alpha": 50.0}},
    ),
    "gemma": ("gemma", _GEMMA),
    "gemma2": (
        "gemma2",
        _GEMMA
        | {"query_pre_attn_scalar": 10, "sliding_window": 5}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": (
        "gemma3_text",
        _GEMMA
        | {"query_pre_attn_scalar": 10, "sliding_window": 5, "rope_parameters": _LOCAL}
        | {"layer_types": _MIXED},
    ),
    "gpt_neox": ("gpt_neox", _SIZES),
    "gpt_neox-sequential": ("gpt_neox", _SIZES | {"use_parallel_residual": False, "attention_bias": False}),
    "phi": ("phi", _LLAMA),
    "opt": ("opt", _OPT),
    "opt-350m": ("opt", _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "opt-narrow": ("opt", _OPT | {"word_embed_proj_dim": 20, "enable_bias": False}),
    "falcon": ("falcon", _FALCON),
    "falcon-40b": ("falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-alibi": ("falcon", _FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-alibi-one-key": ("falcon", _FALCON | {"alibi": True}),
    "falcon-rw": ("falcon", _FALCON | {"multi_query": False, "parallel_attn": False, "bias": True}),
}

# Cases whose models ``parallelize`` and ``hf_layers`` refuse, and the setting for which they do.
_ALIBI = dict.fromkeys(("falcon-alibi", "falcon-alibi-one-key"), "alibi=True")
NOT_SHARDED = {"stablelm-norms": "qk_layernorm=True", **_ALIBI}
NOT_LISTED = {**_ALIBI, "opt-350m": "do_layer_norm_before=False", "opt-narrow": "word_embed_proj_dim=20"}
# Cases whose rows are longer than what is generated with the KV cache.
NOT_GENERATED = ("phi3-long-rows", "llama-dynamic-long-rows")
_DELTA = _LLAMA | {"head_dim": 8, "num_hidden_layers": 4} | {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
_DELTA |= {"linear_key_head_dim": 6, "linear_value_head_dim": 5}
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 5, "n_groups": 2, "chunk_size": 8}
_BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 5, "mamba_chunk_size": 8, "mamba_expand": 2}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("qwen3_5_text", _DELTA),
    "qwen3_5_text-biases": (
        "qwen3_5_text",
        _DELTA
        | {"attention_bias": True, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "num_hidden_layers": 3}
        | {"layer_types": ["full_attention", "linear_attention", "full_attention"], "tie_word_embeddings": True},
    ),
    # Queries, keys and values of equal widths: transformers 5.23 saves their convolution in three equal parts.
    "olmo_hybrid": (
        "olmo_hybrid",
        _DELTA
        | {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_value_head_dim": 3}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "olmo_hybrid-rope": (
        "olmo_hybrid",
        _LLAMA
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "linear_num_key_heads": 2}
        | {"linear_value_head_dim": 6, "linear_allow_neg_eigval": False, "rms_norm_eps": 1e-3},
    ),
    "nemotron_h": (
        "nemotron_h",
        {name: value for name, value in _LLAMA.items() if name != "num_hidden_layers"}
        | _MAMBA
        | {"head_dim": 6, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "nemotron_h-biases": (
        "nemotron_h",
        {name: value for name, value in _LLAMA.items() if name != "num_hidden_layers"}
        | _MAMBA
        | {"head_dim": 10, "layers_block_type": ["full_attention", "linear_attention", "mlp"], "mlp_bias": True}
        | {"use_bias": True, "use_conv_bias": False, "n_groups": 1, "time_step_min": 0.3, "mlp_hidden_act": "silu"},
    ),
    "bamba": ("bamba", _LLAMA | _BAMBA | {"attn_layer_indices": [1]}),
    "bamba-biases": (
        "bamba",
        _LLAMA
        | _BAMBA
        | {"attn_layer_indices": [0, 2], "mamba_n_groups": 2, "mamba_proj_bias": True, "mamba_conv_bias": False}
        | {"attention_bias": True, "mlp_bias": True, "time_step_limit": (0.2, float("inf"))},
    ),
    "mamba2": (
        "mamba2",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "residual_in_fp32": False}
        | {"num_heads": 4, "head_dim": 16, "state_size": 5, "n_groups": 2, "chunk_size": 8}
        | _TOKENS,
    ),
}

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "router_aux_loss_coef": 0.0,
    "experts_implementation": "eager",
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
_QWEN = {"num_experts": 4, "moe_intermediate_size": 20, "head_dim": 6, "num_key_value_heads": 2}
_DEEPSEEK = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "routed_scaling_factor": 1.7,
}
_GLM4_MOE = {
    "num_key_value_heads": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.7,
}
_ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 20, "num_key_value_heads": 2}
_GRANITE = {"num_local_experts": 4, "num_key_value_heads": 2, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}
_GRANITE |= {"residual_multiplier": 0.7, "logits_scaling": 2.0}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 2}),
    "mixtral-window": (
        "Mixtral",
        {"num_local_experts": 6, "num_key_value_heads": 4} | {"sliding_window": 5, "tie_word_embeddings": True},
    ),
    "qwen2_moe": ("Qwen2Moe", _QWEN | {"shared_expert_intermediate_size": 28}),
    "qwen2_moe-window": (
        "Qwen2Moe",
        _QWEN
        | {"shared_expert_intermediate_size": 16, "qkv_bias": False, "norm_topk_prob": True, "num_hidden_layers": 4}
        | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3, "mlp_only_layers": [1]},
    ),
    "qwen3_next": (
        "Qwen3Next",
        _QWEN
        | {"num_hidden_layers": 4, "head_dim": 8, "shared_expert_intermediate_size": 28}
        | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6}
        | {"linear_value_head_dim": 5},
    ),
    "qwen3_next-dense": (
        "Qwen3Next",
        _QWEN
        | {"num_hidden_layers": 3, "head_dim": 16, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "attention_bias": True}
        | {"linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 4}
        | {"linear_value_head_dim": 3, "linear_conv_kernel_dim": 3, "norm_topk_prob": False},
    ),
    # One block with experts: a loss of all blocks together is then a loss of each block.
    "qwen3_moe": ("Qwen3Moe", _QWEN | {"mlp_only_layers": [0], "router_aux_loss_coef": 0.5}),
    "qwen3_moe-step": ("Qwen3Moe", _QWEN | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {"num_experts": 4, "clip_qkv": 0.4}),
    "olmoe-grouped": ("Olmoe", {"num_experts": 8, "num_key_value_heads": 2, "norm_topk_prob": True}),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 6, "sliding_window": 5, "num_hidden_layers": 3}
        | {"rope_parameters": _YARN | {"truncate": False}},
    ),
    "gpt_oss-plain": (
        "GptOss",
        {"num_local_experts": 6, "num_key_value_heads": 4, "head_dim": 10, "sliding_window": 4}
        | {"attention_bias": False, "swiglu_limit": 0.7, "swiglu_alpha": 1.1, "num_experts_per_tok": 3}
        | {"layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "glm4_moe": ("Glm4Moe", _GLM4_MOE | {"use_qk_norm": True, "n_group": 4, "topk_group": 2}),
    "glm4_moe-yarn": (
        "Glm4Moe",
        _GLM4_MOE
        | {"n_shared_experts": 2, "attention_bias": True, "norm_topk_prob": False, "first_k_dense_replace": 0}
        | {"head_dim": 16, "rope_parameters": _YARN | {"partial_rotary_factor": 0.75}, "num_experts_per_tok": 3},
    ),
    "dots1": ("Dots1", _GLM4_MOE),
    "dots1-window": (
        "Dots1",
        _GLM4_MOE
        | {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "attention_bias": True, "num_hidden_layers": 3}
        | {"max_window_layers": 2, "sliding_window": 5, "first_k_dense_replace": 2},
    ),
    "solar_open": ("SolarOpen", _GLM4_MOE | {"head_dim": 6}),
    "solar_open-biases": (
        "SolarOpen",
        _GLM4_MOE | {"head_dim": 8, "attention_bias": True, "n_shared_experts": 2, "rope_parameters": _YARN},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {"num_experts": 8, "num_key_value_heads": 2, "moe_intermediate_size": 20, "num_hidden_layers": 3}
        | {"sliding_window": 5, "sliding_window_pattern": 2},
    ),
    "exaone_moe-mixed": (
        "ExaoneMoe",
        {"num_experts": 8, "num_key_value_heads": 4, "moe_intermediate_size": 20, "num_hidden_layers": 3}
        | {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_shared_experts": 2, "norm_topk_prob": False}
        | {"n_group": 4, "topk_group": 2},
    ),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 4, "num_key_value_heads": 4, "head_dim": 8}),
    "minimax_m2-partial": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4, "num_experts_per_tok": 3},
    ),
    "ernie4_5_moe": ("Ernie4_5_Moe", _ERNIE),
    "ernie4_5_moe-interval": (
        "Ernie4_5_Moe",
        _ERNIE
        | {"moe_num_shared_experts": 1, "moe_layer_interval": 2, "moe_layer_start_index": 2, "num_hidden_layers": 7}
        | {"moe_layer_end_index": 5, "tie_word_embeddings": False, "moe_k": 3},
    ),
    "llama4_text": (
        "Llama4",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 2, "head_dim": 6}
        | {"intermediate_size_mlp": 40, "no_rope_layer_interval": 2, "attention_chunk_size": 5, "floor_scale": 3},
    ),
    "llama4_text-mixed": (
        "Llama4",
        {"num_local_experts": 6, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size_mlp": 28}
        | {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True}
        | {"layer_types": ["full_attention", "chunked_attention", "chunked_attention", "full_attention"]}
        | {"no_rope_layers": [1, 0, 1, 1], "attention_chunk_size": 4, "floor_scale": 2, "attn_scale": 0.7}
        | {"tie_word_embeddings": True},
    ),
    "flex_olmo": ("FlexOlmo", {"num_experts": 4}),
    "flex_olmo-biases": (
        "FlexOlmo",
        {"num_experts": 6, "num_key_value_heads": 2, "attention_bias": True, "norm_topk_prob": True}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "granitemoe": ("GraniteMoe", _GRANITE),
    "granitemoe-biases": (
        "GraniteMoe",
        _GRANITE
        | {"num_local_experts": 6, "attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": _YARN},
    ),
    "deepseek_v2": ("DeepseekV2", _DEEPSEEK | {"q_lora_rank": None}),
    "deepseek_v2-yarn": (
        "DeepseekV2",
        _DEEPSEEK
        | {"q_lora_rank": 14, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}},
    ),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK | {"q_lora_rank": 14, "n_group": 4, "topk_group": 2}),
    "deepseek_v3-yarn": (
        "DeepseekV3",
        _DEEPSEEK
        | {"q_lora_rank": None, "n_group": 2, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False}
        | {"rope_parameters": _YARN | {"beta_fast": 2.0, "beta_slow": 0.2}},
    ),
}
T5: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 6, "d_ff": 44, "num_layers": 2, "num_heads": 4}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
