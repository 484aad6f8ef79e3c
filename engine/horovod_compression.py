"""Horovod's ``Compression``: in which dtype numbers are sent.

Anything with ``compress(tensor) -> (tensor, context)`` and ``decompress(tensor, context) -> tensor`` may stand in for
one of these; what ``compress`` returns is added up over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NoneCompressor:
    """As they are."""

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor itself."""
        return tensor


class _Narrow(NoneCompressor):
    """Floating-point numbers in a dtype of 2 bytes; others as they are."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor in 2 bytes a number, and the dtype it had."""
        return (tensor.to(cls.dtype), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor in the dtype it had."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Narrow):
    """In fp16: 11 bits of precision; a sum beyond 65,504 is infinite."""

    dtype = torch.float16


class BF16Compressor(_Narrow):
    """In bf16: 8 bits of precision, and the range of fp32. Horovod has no such."""

    dtype = torch.bfloat16


class Compression:
    """What ``compression=`` takes: ``Compression.none``, ``Compression.fp16`` or ``Compression.bf16``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def elementwise(compression: Any) -> bool:
    """Whether it is one of these, which treat every number alone, so that several tensors may be sent as one."""
    return compression in (NoneCompressor, FP16Compressor, BF16Compressor)
