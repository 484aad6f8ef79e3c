"""Numbers of 4 and 8 bits for the weights of a matrix, in blocks with a scale each: NF4, int8, double quantization.

A block is a run of neighbouring inputs of one output, and its scale is the largest absolute value in it:

    format        block           number                     bytes of a weight
    nf4           64 inputs       one of 16 values, 4 bits   1/2 + 4/64
    nf4-double    64 inputs       as nf4                     1/2 + 1/64 + 4/(64 x 256), and 4 of the matrix
    int8          all inputs      -127 to 127, 8 bits        1 + 4/inputs

NF4 and double quantization are those of QLoRA (Dettmers et al. 2023, arXiv:2305.14314, section 3), int8 is row-wise
(Dettmers et al. 2022, arXiv:2208.07339). Codes and scales are those of bitsandbytes, if 64 divides the inputs:
bitsandbytes counts blocks through the flattened matrix, and here no block has inputs of two outputs. Codes of scales
are the nearest, which a few of bitsandbytes on a CPU are not.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 64  # inputs with one scale
OUTER = 256  # scales with one scale of their own, under double quantization
# Quantiles of the normal distribution: appendix E of QLoRA's paper.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def block_size(form: str, inputs: int) -> int:
    """Return the number of inputs that have one scale."""
    return inputs if form == "int8" else BLOCK


def codes_of(form: str, weight: Tensor, scales: Tensor) -> Tensor:
    """Quantize a weight.

    Args:
        form: ``nf4``, ``nf4-double`` or ``int8``.
        weight: fp32 (N, K).
        scales: fp32 (N, K), for each weight the scale of its block.

    Returns:
        int8 (N, K), or uint8 (N, K / 2): the code of an even input in the high half of a byte, of the next in the low.
    """
    if form == "int8":
        return torch.round(weight * (127.0 / scales.clamp(min=1e-38))).to(torch.int8)
    values = torch.tensor(NF4, device=weight.device)
    scaled = (weight * (1.0 / scales.clamp(min=1e-38))).clamp(-1, 1)
    codes = torch.bucketize(scaled, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)
    return (codes[:, ::2] << 4) | codes[:, 1::2]


def weight_of(form: str, codes: Tensor, scales: Tensor, groups: Tensor | None) -> Tensor:
    """Compute a weight.

    Args:
        form, codes: as for ``codes_of``, and what it returns.
        scales: fp32 (N, G).
        groups: the block of each input, (K,); None: blocks are equal runs.

    Returns:
        fp32 (N, K).
    """
    if form == "int8":
        return codes * scales * (1 / 127)
    values = _pairs(codes.device).index_select(0, codes.reshape(-1).int()).view(len(codes), -1)
    if groups is not None:
        return values.mul_(scales.index_select(1, groups))
    return values.view(len(values), scales.shape[1], -1).mul_(scales[..., None]).view(values.shape)


def whole_weight(
    form: str, codes: Tensor, scales: Tensor, outer: Tensor | None = None, mean: Tensor | None = None
) -> Tensor:
    """Compute the whole weight, fp32 (N, K), from the whole tensors that a layer's ``QuantizedNumbers`` keeps."""
    if outer is not None and mean is not None:
        places = torch.arange(scales.numel()).view(scales.shape) // OUTER
        scales = outer_values(scales, outer.view(torch.float32), mean.view(torch.float32), places)
    else:
        scales = scales.view(torch.float32)
    return weight_of(form, codes, scales, torch.arange(codes.shape[1] * 2) // BLOCK)


def outer_codes(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize the scales of a whole matrix: their differences from their mean, in blocks of 256 along the rows.

    Args:
        scales: fp32 (N, G), of the whole matrix.

    Returns:
        uint8 (N, G); the scales of these blocks, fp32 (N G / 256,), rounded up; and the mean, fp32 (1,).
    """
    flat = scales.reshape(-1)
    mean = flat.mean()
    blocks = torch.nn.functional.pad(flat - mean, (0, -flat.numel() % OUTER)).view(-1, OUTER)
    outer = blocks.abs().amax(1)
    table = dynamic_map(scales.device)
    scaled = blocks / outer.clamp(min=1e-38)[:, None]
    codes = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)
    return codes.view(-1)[: flat.numel()].view(scales.shape), outer, mean.view(1)


def outer_values(codes: Tensor, outer: Tensor, mean: Tensor, places: Tensor) -> Tensor:
    """Return scales, fp32 (N, G), from codes, (N, G), and the number of each one's block, (N, G)."""
    value = dynamic_map(codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)
    return value * outer[places] + mean


def dynamic_map(device: torch.device) -> Tensor:
    """Return the 256 numbers of 8 bits with a dynamic exponent, in order (Dettmers 2016, arXiv:1511.04561).

    For each power of ten from 1e-6 to 1, the middles of twice as many equal parts of [0.1, 1] as for the one before;
    with both signs; and 0 and 1.
    """
    return _dynamic_map().to(device)


@cache
def _dynamic_map() -> Tensor:
    values = [torch.tensor([0.0, 1.0])]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = 10 ** (exponent - 6) * (bounds[:-1] + bounds[1:]) / 2
        values += [middles, -middles]
    return torch.cat(values).sort().values


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte: fp32 (256, 2)."""
    values = torch.tensor(NF4, device=device)
    return torch.cartesian_prod(values, values)
