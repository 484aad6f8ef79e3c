"""Floats as blocks of small integers, each block with a scale: what ZeRO++ sends in their place.

Wang et al. 2023 (arXiv:2306.10209): one scale for a whole tensor is set by its largest element, and what is small
beside that is lost; a block has a scale of its own, so an element is compared with its neighbours only. Symmetric: a
block of x is sent as s = max |x| / q and the integers x / s, rounded to the nearest, with q = 127 in 8 bits and 7 in 4.
An element is off by s / 2 at the most.

A row of n elements is sent as one row of bytes:

    | scales, one a block | integers, one or half a byte an element | padding to a scale |
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements that share a scale. Its 4 bytes are 1.6 % of the block's in 8 bits and 3.1 % in 4. Of 256 normal numbers the
# largest is 2.9 deviations, of 8000 (DeepSpeed's blocks are about as large) 3.9: larger blocks would save these few
# percent, for a third more error, and far more where outliers are.
BLOCK = 256


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which scales are sent, and all is computed: fp32, or float64 where elements are."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def packed_bytes(numel: int, bits: int, dtype: torch.dtype) -> int:
    """Bytes of a row of ``numel`` elements of this dtype in 8 or 4 bits."""
    size = scale_dtype(dtype).itemsize
    return -(-(_blocks(numel) * size + _integers(numel, bits)) // size) * size


def pack(rows: Tensor, bits: int) -> Tensor:
    """Quantise rows.

    A block with an infinity or a NaN in it comes back as NaN, all of it: an overflow is seen on every rank. One whose
    scale would be no normal number (its largest element is below 1.5e-36, in fp32 and 8 bits) comes back as zeros.

    Args:
        rows: (..., n) of any floating dtype; only the last dim need be contiguous.
        bits: of an integer: 8 or 4.

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
    for start, first, blocks, length in _runs(numel):
        x = rows[..., start : start + blocks * length].unflatten(-1, (blocks, length)).to(wide)
        scale = x.abs().amax(-1).div_(most)
        inverse = torch.where(scale.isfinite() & (scale >= tiny), scale.reciprocal(), 0.0)
        # Times 0 an infinity is NaN too: that is then 0, and the scale says what was there.
        whole = x.mul(inverse.unsqueeze(-1)).round_().nan_to_num_(0.0).to(torch.int8)
        scales[..., first : first + blocks] = scale
        home = integers[..., _bytes(start, bits) :][..., : blocks * -(-length * bits // 8)].unflatten(-1, (blocks, -1))
        if bits == 8:
            home.copy_(whole.view(torch.uint8))
        else:
            # The first half of a block in the lower four bits, the second in the upper: slices, not every second one.
            half = -(-length // 2)
            torch.bitwise_and(whole[..., :half].view(torch.uint8), 15, out=home)
            home[..., : length - half] += whole[..., half:].view(torch.uint8) << 4
    return packed


def unpack(packed: Tensor, numel: int, bits: int, dtype: torch.dtype, output: Tensor | None = None) -> Tensor:
    """What ``pack`` made, as floats again.

    Args:
        packed: (..., bytes) of uint8, contiguous.
        numel: elements of a row.
        bits: of an integer.
        dtype: of what was packed.
        output: (..., numel), where to put it; None: a new tensor in the dtype of scales.
    """
    wide = scale_dtype(dtype)
    if output is None:
        output = torch.empty(*packed.shape[:-1], numel, dtype=wide, device=packed.device)
    if not numel:
        return output
    scales, integers = _parts(packed, numel, wide)
    for start, first, blocks, length in _runs(numel):
        scale = scales[..., first : first + blocks].unsqueeze(-1)
        home = integers[..., _bytes(start, bits) :][..., : blocks * -(-length * bits // 8)].unflatten(-1, (blocks, -1))
        into = output[..., start : start + blocks * length].unflatten(-1, (blocks, length))
        signed = home.view(torch.int8)
        if bits == 8:
            torch.mul(signed, scale, out=into)
        else:
            half = -(-length // 2)
            torch.mul(((signed & 15) ^ 8) - 8, scale, out=into[..., :half])
            torch.mul(signed[..., : length - half] >> 4, scale, out=into[..., half:])
    return output


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _runs(numel: int) -> Iterator[tuple[int, int, int, int]]:
    """Blocks of one length: their first element, the number of the first, how many, and the elements of each."""
    full, rest = divmod(numel, BLOCK)
    if full:
        yield 0, 0, full, BLOCK
    if rest:
        yield full * BLOCK, full, 1, rest


def _integers(numel: int, bits: int) -> int:
    """Bytes of a row's integers."""
    return sum(blocks * -(-length * bits // 8) for _, _, blocks, length in _runs(numel))


def _bytes(elements: int, bits: int) -> int:
    return elements * bits // 8


def _parts(packed: Tensor, numel: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Views of the scales and of the integers."""
    end = _blocks(numel) * wide.itemsize
    return packed[..., :end].view(wide), packed[..., end:]
