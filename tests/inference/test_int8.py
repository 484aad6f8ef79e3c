"""Weights in 8 bits: their error and bytes, on every grid, in generation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.grid import Grid, layout_of
from triax.inference.engine import init_inference
from triax.inference.int8 import Int8, dequantize, quantize, quantize_tensor, weight_bytes
from triax.models.gpt import GPTConfig, gpt_layers

from support.generating_models import GPT, LLAMA, model

UNTIED = replace(LLAMA, tie_word_embeddings=False)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [50] * 7]
OPTIONS = [Int8(group=7), Int8(groups=3, symmetric=False)]  # groups that the tensor axis cuts


def by_hand(w: Tensor, size: int, symmetric: bool) -> Tensor:
    """The same rule, one group after the other, in float64."""
    out = w.clone()
    for row in range(w.shape[0]):
        for start in range(0, w.shape[1], size):
            part = w[row, start : start + size]
            if symmetric:
                scale, zero = part.abs().max() / 127, torch.tensor(0.0).double()
            else:
                scale, zero = (part.max() - part.min()) / 254, (part.max() + part.min()) / 2
            out[row, start : start + size] = ((part - zero) / scale).round() * scale + zero
    return out


@pytest.mark.parametrize("options", [Int8(8), Int8(7), Int8(100), Int8(groups=3), Int8(8, symmetric=False), *OPTIONS])
def test_int8_weights_follow_the_formula(options: Int8) -> None:
    w = torch.randn(6, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    numbers, scale, zero, group = quantize_tensor(w, options, torch.arange(24), 24)
    found = dequantize(numbers, scale, zero, group)
    size = options.size(24)
    assert numbers.dtype == torch.int8
    torch.testing.assert_close(found.double(), by_hand(w, size, options.symmetric), atol=1e-6, rtol=0)
    groups = w.split(size, dim=1)
    for part, got in zip(groups, found.double().split(size, dim=1)):
        reach = (2 * part.abs().amax(1) if options.symmetric else part.amax(1) - part.amin(1)) / 254
        assert ((part - got).abs().amax(1) <= reach / 2 + 1e-6).all()  # half a step


def on_grid(sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Tokens with quantized weights, and this rank's quantized numbers in the whole weights."""
    grid, results = Grid(*sizes), {}
    for config in (GPT, UNTIED):
        for options in OPTIONS:
            engine = init_inference(model(config, grid).eval(), int8=options, max_batch=3)
            name = f"{type(config).__name__} {options}"
            results[name] = engine.generate(PROMPTS, 9, temperature=0, logprobs=True)
        results[name] += engine.generate(PROMPTS, 9, num_beams=2, logprobs=True)
    return results


GRIDS = [(1, 1, 2), *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ((2, 1, 2), (2, 2, 1), (1, 1, 4)))]


@pytest.mark.parametrize("sizes", GRIDS, ids=lambda s: "x".join(map(str, s)))
def test_int8_weights_generate_equal_tokens_on_every_grid(ranks: Any, sizes: tuple[int, int, int]) -> None:
    wanted = on_grid((1, 1, 1))
    for result in ranks(math.prod(sizes), on_grid, sizes, timeout=120):
        for name, want in wanted.items():
            assert [each.tokens for each in result[name]] == [each.tokens for each in want], name
            for each, other in zip(result[name], want):
                assert each.logprobs == pytest.approx(other.logprobs, abs=1e-10)


def test_int8_weights_take_a_quarter_with_small_errors() -> None:
    """The logits of a model in 8 bits beside those of the same model in fp32."""
    config = GPTConfig(256, 64, 128, 4, 4)
    module = triax.PipelineModule(gpt_layers(config)).eval()
    ids = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, bytes_before = module(ids), weight_bytes(module)
        blocks = sum(
            p.numel() for name, p in module.named_parameters() if p.dim() == 2 and name.split(".")[1] in "2345"
        )
        names = quantize(module, module.grid)
        found = module(ids)
    assert len(names) == 4 * 4 and all(
        "weight" not in dict(module.get_submodule(name).named_parameters()) for name in names
    )
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert 1e-4 < error < 0.02
    # One byte in place of four, and an fp32 scale for each 64 inputs.
    assert weight_bytes(module) == bytes_before - 4 * blocks + blocks + 4 * blocks // 64
    before = weight_bytes(module)
    init_inference(module).generate(PROMPTS, 4)
    assert weight_bytes(module) == before


def test_quantize_replaces_linears_of_a_plain_module() -> None:
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(3, 8)
    with torch.no_grad():
        wanted = module(x)
        assert quantize(module, Grid(), Int8(8)) == ["0", "2"]
        assert (module(x) - wanted).abs().max() < 0.02 * wanted.abs().max()
    assert layout_of(module[0].weight).shape == (16, 8) and "Int8Linear" in repr(module)
    assert list(module.state_dict()) == [
        f"{i}.{name}" for i in (0, 2) for name in ("bias", "weight_int8", "weight_scale")
    ]
    embedding = nn.Embedding(5, 8)
    tied = nn.ModuleDict({"in": embedding, "hidden": nn.Linear(8, 8), "out": nn.Linear(8, 5, bias=False)})
    tied["out"].weight = embedding.weight
    assert quantize(tied, Grid()) == ["hidden"]


def test_quantize_refuses_a_quantized_model_and_a_lone_linear() -> None:
    module = nn.Sequential(nn.Linear(8, 4))
    quantize(module, Grid())
    with pytest.raises(ValueError, match=r"0 is quantized already. Quantize a model once"):
        quantize(module, Grid())
    with pytest.raises(ValueError, match=r"itself a linear layer, which cannot be replaced: pass nn.Sequential\(modul"):
        quantize(nn.Linear(8, 4), Grid())
    with pytest.raises(ValueError, match=r"group is 0. Give at least 1"):
        Int8(0)


def test_int8_is_refused_for_an_engine_that_trains() -> None:
    engine = triax.initialize(
        model=triax.PipelineModule(gpt_layers(GPT), loss_fn=lambda x, y: x.sum()),
        config={"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )[0]
    with pytest.raises(ValueError, match=r"int8 would change the weights that this engine trains. Leave out int8"):
        init_inference(engine, int8=True)
