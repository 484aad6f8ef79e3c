"""NF4 and int8 against the published table and bitsandbytes; double quantization; the bytes of each format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from triax.grid import Grid
from triax.grid.layout import Layout
from triax.tensor_parallel import nf4
from triax.tensor_parallel.quantized import QuantizedNumbers

FORMS = ["nf4", "nf4-double", "int8"]


def numbers(form: str, weight: Tensor) -> QuantizedNumbers:
    return QuantizedNumbers(form, Layout(tuple(weight.shape)), Grid().tensor, weight)


def weight_of(rows: int = 96, columns: int = 320, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)


def test_nf4_values_are_quantiles_of_the_normal_distribution() -> None:
    """As in QLoRA's section 3: 8 equally likely values above 0, 7 below, and 0, scaled to [-1, 1]."""
    edge = 0.9677083
    below = torch.special.ndtri(torch.linspace(edge, 0.5, 8, dtype=torch.float64)[:-1])
    above = torch.special.ndtri(torch.linspace(edge, 0.5, 9, dtype=torch.float64)[:-1])
    values = torch.cat([-below, torch.zeros(1, dtype=torch.float64), above]).sort().values
    torch.testing.assert_close(torch.tensor(nf4.NF4, dtype=torch.float64), values / values.max(), rtol=0, atol=1e-6)


def nearest_values(weight: Tensor) -> Tensor:
    """Return the weight after its quantization to NF4: a plain loop over blocks of 64 of each row, in fp32."""
    weight, table = weight.detach().float(), torch.tensor(nf4.NF4)
    found = torch.empty_like(weight)
    for row in range(len(weight)):
        for start in range(0, weight.shape[1], 64):
            block = weight[row, start : start + 64]
            nearest = (block[:, None] / block.abs().max() - table).abs().argmin(1)
            found[row, start : start + 64] = table[nearest] * block.abs().max()
    return found


def test_nf4_codes_choose_the_nearest_value() -> None:
    """Against a plain loop over the blocks; 70 inputs are a block of 64 and one of 6."""
    weight = weight_of(8, 70)
    made, table = numbers("nf4", weight), torch.tensor(nf4.NF4)
    torch.testing.assert_close(made.dense(), nearest_values(weight), rtol=1e-6, atol=0)
    high, low = made.codes[0, 0] >> 4, made.codes[0, 0] & 15
    assert torch.equal(table[torch.stack([high, low]).int()] * weight[0, :64].abs().max(), made.dense()[0, :2])


@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights_take_the_bytes_of_the_formula(form: str) -> None:
    made = numbers(form, weight_of(96, 320))
    groups = 96 * 320 // 64
    wanted = {
        "nf4": 96 * 320 / 2 + 4 * groups,
        "nf4-double": 96 * 320 / 2 + groups + 4 * -(-groups // 256) + 4,
        "int8": 96 * 320 + 4 * 96,
    }
    assert sum(each.nbytes for each in made.parameters()) == wanted[form]
    step = {"nf4": 0.16, "nf4-double": 0.17, "int8": 0.5 / 127}[form]  # half of the widest gap, over the largest value
    assert (made.dense() - weight_of()).abs().max() < step * weight_of().abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantized_codes_and_values_equal_bitsandbytes(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = weight_of(dtype=dtype)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    made = numbers("nf4", weight)
    assert torch.equal(made.codes.view(-1, 1), codes)
    assert torch.equal(made.scales.view(torch.float32).view(-1), state.absmax)
    assert torch.equal(made.dense().to(dtype), functional.dequantize_4bit(codes, state))
    if dtype == torch.float16:
        rows, largest, _ = functional.int8_vectorwise_quant(weight.clone())
        made = numbers("int8", weight)
        assert torch.equal(made.codes, rows) and torch.equal(made.scales.view(torch.float32).view(-1), largest)
        assert torch.equal(made.dense(), functional.int8_vectorwise_dequant(rows, largest))


def test_double_quantization_equals_bitsandbytes() -> None:
    """Equal but for 1 % of the scales: on a CPU, bitsandbytes does not always take the nearest number of its table."""
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(weight_of(), blocksize=64, quant_type="nf4", compress_statistics=True)
    table, outer, mean = state.state2.code, state.state2.absmax, state.offset
    found: Any = numbers("nf4-double", weight_of())
    assert torch.equal(found.codes.view(-1, 1), codes)
    assert torch.equal(nf4.dynamic_map(codes.device), table)
    assert torch.equal(found.outer.view(torch.float32), outer)
    assert torch.equal(found.mean.view(torch.float32).view(()), mean)
    scales, other_scales = found.scales.view(-1), state.absmax  # as numbers of the table
    assert (scales != other_scales).sum() <= 0.01 * scales.numel()
    exact = (numbers("nf4", weight_of()).scales.view(torch.float32).view(-1) - mean) / outer.repeat_interleave(256)[
        :480
    ]
    assert ((table[scales.int()] - exact).abs() <= (table[other_scales.int()] - exact).abs() + 1e-7).all()
    torch.testing.assert_close(found.dense(), functional.dequantize_4bit(codes, state), rtol=1e-2, atol=1e-8)


def test_quantized_weights_are_dequantized_when_read() -> None:
    """Autograd saves such a weight without its values, and a write to the weight is refused."""
    from triax.tensor_parallel.quantized import quantize_layer

    layer = torch.nn.Linear(128, 64, dtype=torch.float64)
    quantize_layer(layer, "layer", "nf4", Grid().tensor, False)
    dense, saved = layer.quantized.dense().double(), list[Tensor]()  # type: ignore[operator, union-attr]
    x = torch.randn(3, 128, dtype=torch.float64, requires_grad=True)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        y = layer(x)
    torch.testing.assert_close(y, x @ dense.t() + layer.bias)
    (y * torch.arange(64)).sum().backward()
    torch.testing.assert_close(x.grad, torch.arange(64, dtype=torch.float64).expand(3, 64) @ dense)
    assert {type(each).__name__ for each in saved if each.numel() == dense.numel()} == {"ComputedWeight"}
    with pytest.raises(RuntimeError, match="is kept in nf4"):
        layer.weight.zero_()


READS: dict[str, Any] = {
    "cat": lambda weight, x: torch.cat([weight, x.new_ones(2, 128)]),
    "cat of two dtypes": lambda weight, x: torch.cat([weight, x.float()]),
    "stack": lambda weight, x: torch.stack([weight, weight]),
    "keywords": lambda weight, x: torch.nn.functional.linear(input=x, weight=weight),
    "block_diag": lambda weight, x: torch.block_diag(weight, x),
    "foreach": lambda weight, x: torch.stack(torch._foreach_norm([weight])),
    "add a product": lambda weight, x: torch.addmm(input=x.new_ones(3, 64), mat1=x, mat2=weight.t()),
}


@pytest.mark.parametrize("read", READS)
def test_quantized_weights_are_dequantized_in_lists_and_keywords(read: str) -> None:
    """A write to a weight in a list or keyword is refused, because it would change a copy."""
    from triax.tensor_parallel.quantized import quantize_layer

    layer = torch.nn.Linear(128, 64, dtype=torch.float64)
    wanted = nearest_values(layer.weight).double()
    quantize_layer(layer, "layer", "nf4", Grid().tensor, False)
    dense, x = layer.quantized.dense().double(), torch.linspace(-1, 1, 384, dtype=torch.float64).view(3, 128)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(dense, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(READS[read](layer.weight, x), READS[read](dense, x), rtol=0, atol=1e-10)
    for write in (lambda: torch._foreach_mul_([layer.weight], 2.0), lambda: torch.add(dense, 1, out=layer.weight)):
        with pytest.raises(RuntimeError, match="is kept in nf4"):
            write()
