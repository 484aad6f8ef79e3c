"""TRL's trainers and transformers' Llama in float64, without the roundings to float32 within."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def exact() -> Iterator[None]:
    """Compute in float64: neither transformers' RMSNorm nor TRL's fused head rounds to fp32."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from trl.kernels import chunked_divergence, chunked_logprob

    class Torch:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return y

    norm, plain = LlamaRMSNorm.forward, torch.Tensor.float
    kernels = [vars(chunked_divergence), vars(chunked_logprob)]
    kind: Any = LlamaRMSNorm
    tensor: Any = torch.Tensor
    kind.forward, tensor.float = forward, torch.Tensor.double
    for kernel in kernels:
        kernel["torch"] = Torch()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        kind.forward, tensor.float = norm, plain
        for kernel in kernels:
            kernel["torch"] = torch
        torch.set_default_dtype(torch.float32)
