"""A random Llama of transformers whose tokens vary, in place of one token for ever."""

from __future__ import annotations

from typing import Any

import torch


def varied_llama() -> Any:
    """Return a Llama in float64 with large random weights."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=53,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        parameter.data *= 5
    return model
