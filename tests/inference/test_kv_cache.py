"""The key-value cache: its bytes, and that its logits equal those of the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from triax.inference.decode_loop import layers_with_cache
from triax.inference.kv_cache import KVCache
from triax.pipe.module import PipelineModule

from support.generating_models import GPT, LLAMA, model
from support.reference import gpt_logits

GROUPED = replace(LLAMA, num_attention_heads=6, num_key_value_heads=2, head_dim=4)
QWEN = replace(LLAMA, num_hidden_layers=2, num_key_value_heads=4, qkv_bias=True, qk_norm=True)


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(53, (rows, length), generator=torch.Generator().manual_seed(3))


class Cached:
    """The model with a cache, by hand."""

    def __init__(self, module: PipelineModule, slots: int, length: int) -> None:
        self.module, self.cache = module, KVCache(torch.device("cpu"))
        self.cache.reserve(slots, length)
        for layer in layers_with_cache(module):
            layer.cache = self.cache

    def __call__(self, slots: list[int], starts: list[int], x: Tensor) -> Tensor:
        """ids (B, T) -> logits (B, T, V)"""
        self.cache.begin(0, slots, starts, x.shape[1])
        return self.module.run_stage(0, x)


@pytest.mark.parametrize("config", [GPT, GROUPED, QWEN], ids=["gpt", "llama-gqa", "qwen"])
@torch.no_grad()
def test_cached_tokens_have_the_logits_of_the_whole_sequence(config: Any) -> None:
    module = model(config).eval()
    x = ids(4, 13)
    whole = module(x)
    if config is GPT:
        weights = {name: p.detach() for name, p in module.named_parameters()}
        torch.testing.assert_close(
            whole, gpt_logits(weights, x, GPT.num_hidden_layers, GPT.num_attention_heads), rtol=1e-10, atol=1e-10
        )
    cached = Cached(module, 6, 16)
    # Neighbours in the cache, and not; each with a prompt of another length; some in pieces.
    slots, lengths = [4, 5, 0, 2], [3, 7, 1, 5]
    for row, (slot, length) in enumerate(zip(slots, lengths)):
        part = cached([slot], [0], x[row : row + 1, :length])
        torch.testing.assert_close(part[0], whole[row, :length], rtol=1e-10, atol=1e-10)
    starts = list(lengths)
    for rows in ([0, 1, 2, 3], [2, 3], [0, 1], [1], [0, 1, 2, 3], [3, 0]):
        tokens = torch.stack([x[row, starts[row]] for row in rows])[:, None]
        part = cached([slots[row] for row in rows], [starts[row] for row in rows], tokens)
        for i, row in enumerate(rows):
            torch.testing.assert_close(part[i, 0], whole[row, starts[row]], rtol=1e-10, atol=1e-10)
            starts[row] += 1
    # Several tokens onto different beginnings; and a slot used again by a shorter sequence.
    part = cached([0, 2], [starts[2], starts[3]], torch.stack([x[r, starts[r] : starts[r] + 3] for r in (2, 3)]))
    for i, row in enumerate((2, 3)):
        torch.testing.assert_close(part[i], whole[row, starts[row] : starts[row] + 3], rtol=1e-10, atol=1e-10)
    part = cached([5], [0], x[:1, :2])
    torch.testing.assert_close(part[0], whole[0, :2], rtol=1e-10, atol=1e-10)
    part = cached([5], [2], x[:1, 2:3])
    torch.testing.assert_close(part[0, 0], whole[0, 2], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kinds", [("sliding_attention", "full_attention"), ("full_attention", "sliding_attention")])
@torch.no_grad()
def test_layers_with_and_without_a_window_have_their_own_masks(kinds: tuple[str, str]) -> None:
    """In one decode step; the logits are those of the whole sequence, on which the window has an effect."""
    config = replace(LLAMA, num_hidden_layers=2, sliding_window=3, layer_types=kinds)
    module, x = model(config).eval(), ids(2, 12)
    whole = module(x)
    without = model(replace(config, layer_types=("full_attention",) * 2)).eval()(x)
    assert not torch.allclose(without[:, 3:], whole[:, 3:], rtol=1e-6)
    cached = Cached(module, 2, 12)
    torch.testing.assert_close(cached([0, 1], [0, 0], x[:, :5]), whole[:, :5], rtol=1e-10, atol=1e-10)
    for start in range(5, 12):
        found = cached([0, 1], [start, start], x[:, start : start + 1])
        torch.testing.assert_close(found[:, 0], whole[:, start], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_kv_cache_bytes_equal_the_formula() -> None:
    for config, kv_heads in ((GPT, 4), (GROUPED, 2)):
        cached = Cached(model(config).eval(), 6, 16)
        cached([0], [0], ids(1, 2))
        head_dim = config.hidden_size // config.num_attention_heads
        assert cached.cache.bytes == 2 * config.num_hidden_layers * 6 * kv_heads * 16 * head_dim * 8
        cached.cache.reserve(3, 9)  # there is room
        assert cached.cache.bytes
        cached.cache.reserve(3, 20)
        assert (cached.cache.slots, cached.cache.length, cached.cache.bytes) == (6, 20, 0)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
@torch.no_grad()
def test_calling_the_module_while_a_cache_is_attached_is_refused(config: Any) -> None:
    module = model(config).eval()
    cached = Cached(module, 2, 8)
    cached([0], [0], ids(1, 3))
    cached.cache.end()
    with pytest.raises(RuntimeError, match="while a stream of tokens uses its cache"):
        module(ids(1, 3))
    assert cached([0], [3], ids(1, 1)).shape == (1, 1, 53)


@torch.no_grad()
def test_a_layer_listed_twice_has_two_caches() -> None:
    """A module listed twice is one layer with two places (as in ALBERT)."""
    module = model(GPT).eval()
    block = module.layers["2"]
    again = PipelineModule([module.layers["0"], module.layers["1"], block, block, module.layers["5"]])
    again.eval()
    x = ids(2, 6)
    whole = again(x)
    cached = Cached(again, 2, 8)
    cached([0, 1], [0, 0], x[:, :5])
    part = cached([0, 1], [5, 5], x[:, 5:])
    torch.testing.assert_close(part[:, 0], whole[:, 5], rtol=1e-10, atol=1e-10)
