"""TRL's trainers and transformers' Llama in float64, without the roundings to float32 within."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def exact() -> Iterator[None]:
    """Compute in float64: neither transformers' RMSNorm nor TRL's fused head rounds to fp32, but rotary angles do."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
    from trl.kernels import chunked_divergence, chunked_logprob

    class Torch:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return y

    def rotary(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensor.float = plain
        try:
            return angles(self, *args, **kwargs)
        finally:
            tensor.float = torch.Tensor.double

    norm, angles, plain = LlamaRMSNorm.forward, LlamaRotaryEmbedding.forward, torch.Tensor.float
    kernels = [vars(chunked_divergence), vars(chunked_logprob)]
    kind: Any = LlamaRMSNorm
    rope: Any = LlamaRotaryEmbedding
    tensor: Any = torch.Tensor
    kind.forward, rope.forward, tensor.float = forward, rotary, torch.Tensor.double
    for kernel in kernels:
        kernel["torch"] = Torch()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        kind.forward, rope.forward, tensor.float = norm, angles, plain
        for kernel in kernels:
            kernel["torch"] = torch
        torch.set_default_dtype(torch.float32)
