"""MXFP4: weights of 4 bits with one scale for 32 of them, in which gpt-oss's experts are published.

OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 and 5.3.3. A value is E2M1, a scale a power of two, E8M0.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # values with one scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign, the highest of the four bits
_BIAS = 127  # of the exponent that a scale is


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values of quantized blocks in bfloat16, which has them exactly.

    Args:
        blocks: uint8 (..., G, 16), two values in each byte, the first one in the low four bits.
        scales: uint8 (..., G).

    Returns:
        (..., 32 G).
    """
    values = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)], device=blocks.device)
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)  # (..., G, 32)
    scaled = torch.ldexp(values[pairs.int()], scales.int()[..., None] - _BIAS)
    return scaled.to(torch.bfloat16).flatten(-2)
