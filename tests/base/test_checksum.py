"""The checksum of a tensor's bits: changing one element or swapping two changes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from triax.base import checksum as module
from triax.base.checksum import checksum

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]


def values(dtype: torch.dtype, size: int) -> Tensor:
    """Values of which many are equal, or differ in few bits: powers of two."""
    generator = torch.Generator().manual_seed(0)
    powers = 2.0 ** torch.randint(-2, 3, (size,), generator=generator)
    return (powers > 1).to(dtype) if dtype == torch.bool else powers.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_changed_or_swapped_elements_change_the_checksum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 16)  # several pieces
    tensor = values(dtype, 40)
    bits = tensor.view(torch.uint8).view(40, -1)
    before = int(checksum(tensor))
    assert before == int(checksum(tensor.clone()))
    for first in range(40):
        for second in range(first):
            swapped = bits.clone()
            swapped[[first, second]] = bits[[second, first]]
            same = torch.equal(swapped, bits)
            assert (int(checksum(swapped.view(-1).view(dtype))) == before) is same, (first, second)
        changed = bits.clone()
        changed[first, -1] ^= 1
        assert int(checksum(changed.view(-1).view(dtype))) != before


def test_the_checksum_ignores_strides_and_takes_empty_tensors() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    assert int(checksum(matrix.t())) == int(checksum(matrix.t().contiguous())) != int(checksum(matrix))
    assert int(checksum(nn.Parameter(torch.empty(0)))) == 0
