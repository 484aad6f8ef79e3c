"""TRL's trainers and transformers' Llama in float64, without the roundings to float32 within."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def exact() -> Iterator[None]:
    """Compute in float64: neither transformers' RMSNorm nor TRL's fused head rounds to fp32.

    Rotary angles stay in fp32, as triax has them: rows that TRL pads on the left differ by their rounding.
    """
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
    from trl.kernels import chunked_divergence, chunked_logprob

    class Torch:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return y

    def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        tensor.float = plain
        try:
            return rotary(self, x, position_ids)
        finally:
            tensor.float = torch.Tensor.double

    norm, rotary, plain = LlamaRMSNorm.forward, LlamaRotaryEmbedding.forward, torch.Tensor.float
    modules = [
        chunked_divergence,
        chunked_logprob,
        sys.modules.get("trl.trainer.grpo_trainer"),
    ]  # its rewards are float32
    spaces = [vars(module) for module in modules if module is not None]
    kind: Any = LlamaRMSNorm
    rope: Any = LlamaRotaryEmbedding
    tensor: Any = torch.Tensor
    kind.forward, rope.forward, tensor.float = forward, angles, torch.Tensor.double
    for space in spaces:
        space["torch"] = Torch()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        kind.forward, rope.forward, tensor.float = norm, rotary, plain
        for space in spaces:
            space["torch"] = torch
        torch.set_default_dtype(torch.float32)
