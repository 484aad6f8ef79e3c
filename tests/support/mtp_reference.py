"""Multi-token prediction in plain PyTorch: equations 21 to 25 of DeepSeek-V3's paper (arXiv:2412.19437), one process.

Blocks are transformers' own. The modules' blocks are the last ones of a model with L + D layers; transformers runs only
the first L of them, so that all parameters have the names of DeepSeek's folder (``model.layers.{L}.eh_proj.weight``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "experts_implementation": "eager",
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


def model_with_modules(modules: int, **changes: Any) -> Any:
    """Return a random model in float64 with D modules. Embedding and head of the modules are not repeated."""
    import transformers

    sizes = {**SIZES, **changes}
    blocks = sizes["num_hidden_layers"]
    config = transformers.DeepseekV3Config(**{**sizes, "num_hidden_layers": blocks + modules})
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model: Any = transformers.DeepseekV3ForCausalLM(config)
    width = config.hidden_size
    for layer in model.model.layers[blocks:]:
        layer.enorm, layer.hnorm = type(model.model.norm)(width), type(model.model.norm)(width)
        layer.eh_proj = nn.Linear(2 * width, width, bias=False)
        layer.shared_head = nn.ModuleDict({"norm": type(model.model.norm)(width)})
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1).add_(torch.randn_like(parameter), alpha=0.1)
    config.num_hidden_layers, config.num_nextn_predict_layers = blocks, modules
    return model


def logits_of(model: Any, ids: Tensor) -> list[Tensor]:
    """Return the logits of the model and of each module k, (B, T - k, V)."""
    inner, config = model.model, model.config
    h = inner(input_ids=ids, use_cache=False).last_hidden_state  # behind the final norm
    found = [model.lm_head(h)]
    for k, layer in enumerate(inner.layers[config.num_hidden_layers :], 1):
        length = ids.shape[1] - k  # tokens t_1 to t_{T-k}, counted from 1 as in the paper
        embedded = inner.embed_tokens(ids[:, k:])  # Emb(t_{i+k})
        joined = torch.cat([layer.enorm(embedded), layer.hnorm(h[:, :length])], dim=-1)
        x = F.linear(joined, layer.eh_proj.weight)  # (21)
        positions = torch.arange(length)[None]
        later = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        x = layer(x, position_embeddings=inner.rotary_emb(x, positions), attention_mask=later, position_ids=positions)
        h = layer.shared_head["norm"](x)  # (22)
        found.append(model.lm_head(h))  # (23)
    return found


def loss_of(logits: list[Tensor], labels: Tensor, factor: float) -> tuple[Tensor, dict[str, float]]:
    """Return the loss, and its terms by name. ``labels`` (B, T) are t_{i+1}, or -100."""
    terms = []
    for k, each in enumerate(logits):
        wanted = labels[:, k:]  # t_{i+k+1}
        terms.append(F.cross_entropy(each.flatten(0, 1), wanted.flatten()))  # (24), over the labels that count
    modules = len(terms) - 1
    loss = terms[0] + factor / modules * sum(terms[1:])  # (25)
    names = ["main", *(f"mtp_{k}" for k in range(1, modules + 1))]
    return loss, {name: term.item() for name, term in zip(names, terms, strict=True)}
