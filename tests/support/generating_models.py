"""A GPT and a Llama that generate, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch

from triax.grid import Grid
from triax.models.gpt import GPTConfig, gpt_layers
from triax.models.llama import LlamaConfig, llama_layers
from triax.pipe.module import PipelineModule

# Vocabularies that the tensor axis does not divide; fewer heads of keys and values than tensor ranks.
GPT = GPTConfig(vocab_size=53, max_position_embeddings=32, hidden_size=24, num_hidden_layers=3, num_attention_heads=4)
LLAMA = LlamaConfig(53, 32, 24, 3, 4, num_key_value_heads=1, intermediate_size=40)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [50] * 7, [11, 12, 13], [2, 1], [33] * 12, [0, 52, 0]]
LIMITS = [5, 9, 3, 12, 1, 20, 8, 10]


def model(config: Any, grid: Grid | None = None, **options: Any) -> PipelineModule:
    sharded = options.pop("sequence_parallel", False)
    layers = gpt_layers(config, sharded) if isinstance(config, GPTConfig) else llama_layers(config, sharded)
    module = PipelineModule(layers, grid=grid, dtype=torch.float64, **options)
    for parameter in {id(p): p for p in module.parameters()}.values():
        parameter.data *= 5  # at their initial size, all logits are nearly alike
    return module
