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
    from trl.kernels import chunked_logprob

    class Torch:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return y

    norm, kernel, plain = LlamaRMSNorm.forward, vars(chunked_logprob), torch.Tensor.float
    kind: Any = LlamaRMSNorm
    tensor: Any = torch.Tensor
    kind.forward, kernel["torch"], tensor.float = forward, Torch(), torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        kind.forward, kernel["torch"], tensor.float = norm, torch, plain
        torch.set_default_dtype(torch.float32)
