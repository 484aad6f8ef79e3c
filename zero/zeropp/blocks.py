"""Blockwise quantization of ZeRO++: blocks of integers of 8 or 4 bits, each block with a scale.

Wang et al. 2023 (arXiv:2306.10209): the largest element of a tensor sets a scale for the whole tensor, and much smaller
elements are lost. With a scale for each block, the largest element of a block limits the precision of that block only.
The quantization is symmetric: a block x is sent as the scale s = max |x| / q and the integers x / s, rounded to the
nearest, with q = 127 for 8 bits and q = 7 for 4 bits. The error of an element is s / 2 at most.

A row of n elements is sent as one row of bytes:

    | scales, one a block | integers, one or half a byte an element | padding to a scale |
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements that share a scale. Its 4 bytes are 1.6 % of a block of 8 bits and 3.1 % of one of 4. The largest of 256
# normal numbers is 2.9 standard deviations, of 8000 it is 3.9: larger blocks would save these
# few percent, for a third more error, and much more with outliers.
BLOCK = 256


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the scales and of the arithmetic, which is fp32, or float64 for float64 elements."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def packed_bytes(numel: int, bits: int, dtype: torch.dtype) -> int:
    """Return the bytes, with scales, of a row of ``numel`` elements quantized to 8 or 4 bits."""
    size = scale_dtype(dtype).itemsize
    return -(-(_blocks(numel) * size + _integers(numel, bits)) // size) * size


def pack(rows: Tensor, bits: int) -> Tensor:
    """Quantize rows of floats to 8 or 4 bits an element, block by block, and pack them with their scales into bytes.

    If a block has an infinity or a NaN, ``unpack`` returns NaN for the whole block, so that every rank detects the
    overflow. If the scale of a block would be subnormal (largest element below 1.5e-36, in fp32 and 8 bits),
    ``unpack`` returns zeros for the block.

    Args:
        rows: (..., n) of any floating dtype; only the last dim need be contiguous.
        bits: bits of a quantized element, 8 or 4.

    Returns:
        (..., ``packed_bytes(n)``) of uint8, contiguous.
    """
    *lead, numel = rows.shape
    wide = scale_dtype(rows.dtype)
    packed = torch.empty(*lead, packed_bytes(numel, bits, rows.dtype), dtype=torch.uint8, device=rows.device)
    if not numel:
        return packed
    scales, integers = _parts(packed, numel, wide)
    integers[..., _integers(numel, bits) :].zero_()
    most, tiny = 2 ** (bits - 1) - 1, torch.finfo(wide).tiny
    for elements, places, used, shape in _runs(numel, bits):
        x = rows[..., elements].unflatten(-1, shape).to(wide)
        scale = x.abs().amax(-1).div_(most)
        inverse = torch.where(scale.isfinite() & (scale >= tiny), scale.reciprocal(), 0.0)
        # Infinities times 0 are NaN too, and become 0; the scale, which is not finite, marks the block.
        whole = x.mul(inverse.unsqueeze(-1)).round_().nan_to_num_(0.0).to(torch.int8)
        scales[..., places] = scale
        target = integers[..., used].unflatten(-1, (shape[0], -1))
        if bits == 8:
            target.copy_(whole.view(torch.uint8))
        else:
            # The first half of a block in the lower four bits, the second in the upper: contiguous slices.
            half = -(-shape[1] // 2)
            torch.bitwise_and(whole[..., :half].view(torch.uint8), 15, out=target)
            target[..., : shape[1] - half] += whole[..., half:].view(torch.uint8) << 4
    return packed


def unpack(packed: Tensor, numel: int, bits: int, dtype: torch.dtype, output: Tensor | None = None) -> Tensor:
    """Dequantize rows of bytes that ``pack`` returned to floats.

    Args:
        packed: (..., bytes) of uint8, contiguous.
        numel: elements of a row.
        bits: bits of a quantized element, 8 or 4.
        dtype: dtype of the rows before ``pack``.
        output: (..., numel), the tensor to write to; None allocates a tensor in the dtype of the scales.

    Returns:
        The dequantized rows, in ``output`` if it is given.
    """
    wide = scale_dtype(dtype)
    if output is None:
        output = torch.empty(*packed.shape[:-1], numel, dtype=wide, device=packed.device)
    if not numel:
        return output
    scales, integers = _parts(packed, numel, wide)
    for elements, places, used, shape in _runs(numel, bits):
        scale = scales[..., places].unsqueeze(-1)
        into = output[..., elements].unflatten(-1, shape)
        signed = integers[..., used].unflatten(-1, (shape[0], -1)).view(torch.int8)
        if bits == 8:
            torch.mul(signed, scale, out=into)
        else:
            half = -(-shape[1] // 2)
            torch.mul(((signed & 15) ^ 8) - 8, scale, out=into[..., :half])
            torch.mul(signed[..., : shape[1] - half] >> 4, scale, out=into[..., half:])
    return output


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _runs(numel: int, bits: int) -> Iterator[tuple[slice, slice, slice, tuple[int, int]]]:
    """Yield runs of blocks of equal length: the full blocks, then the shorter last one.

    Yields:
        The elements of the run in a row, its scales, the bytes of its integers, and (blocks, elements of a block).
    """
    full, rest = divmod(numel, BLOCK)
    stop, end = full * BLOCK, full * BLOCK * bits // 8
    if full:
        yield slice(0, stop), slice(0, full), slice(0, end), (full, BLOCK)
    if rest:
        yield slice(stop, numel), slice(full, full + 1), slice(end, end - (-rest * bits // 8)), (1, rest)


def _integers(numel: int, bits: int) -> int:
    """Return the bytes that the quantized elements of a row take, without the scales."""
    full, rest = divmod(numel, BLOCK)
    return full * BLOCK * bits // 8 - (-rest * bits // 8)


def _parts(packed: Tensor, numel: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a view of the scales, and a view of the quantized elements, in packed rows."""
    end = _blocks(numel) * wide.itemsize
    return packed[..., :end].view(wide), packed[..., end:]
