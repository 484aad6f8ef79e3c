"""Horovod's ``Compression``: the dtype in which numbers are sent.

Any object with ``compress(tensor) -> (tensor, ctx)`` and ``decompress(tensor, ctx) -> tensor`` may be used in place of
one of these; the ranks sum what ``compress`` returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NoneCompressor:
    """No compression."""

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor itself."""
        return tensor


class _HalfCompressor(NoneCompressor):
    """Floating-point numbers in a dtype of 2 bytes; other dtypes unchanged."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor in 2 bytes per number, and its dtype."""
        return (tensor.to(cls.dtype), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in its original dtype, ``ctx``."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_HalfCompressor):
    """Compression to fp16: 11 bits of precision; a sum beyond 65,504 becomes infinite."""

    dtype = torch.float16


class BF16Compressor(_HalfCompressor):
    """Compression to bf16: 8 bits of precision, the range of fp32. An addition of triax; Horovod has none."""

    dtype = torch.bfloat16


class Compression:
    """Values of the argument ``compression``: ``Compression.none``, ``Compression.fp16``, ``Compression.bf16``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def elementwise(compression: Any) -> bool:
    """Return True for the classes of this file: they treat each number alone, so several tensors may share a bucket."""
    return compression in (NoneCompressor, FP16Compressor, BF16Compressor)
