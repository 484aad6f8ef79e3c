"""Self-attention: any number of heads, of kv heads and of ranks; its hooks; packed documents; rotary positions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from triax.context.documents import documents_of, positions_within
from triax.grid import Grid
from triax.grid.layout import layout_of
from triax.grid.randomness.random import Normal
from triax.grid.ranges import split
from triax.models.attention import SelfAttention
from triax.models.config import LlamaConfig, RopeScaling
from triax.models.llama import llama_layers
from triax.models.packed import check_documents, pack
from triax.models.rope import Rope
from triax.pipe.module import PipelineModule

from support.reference import attention, rms_norm, visible
from support.toys import error_text

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
WIDTH, DIM, ROWS, LENGTH = 10, 4, 2, 8
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [4, 4, 4, 4, 4, 4, 4, 9]])


def made(
    grid: Grid, heads: int, kv_heads: int | None, sequence_parallel: bool = False, **changes: Any
) -> SelfAttention:
    torch.manual_seed(3)
    options: dict[str, Any] = {"rope": Rope(DIM), "bias": True, "out_bias": True, "qk_norm": 1e-6} | changes
    layer = SelfAttention(
        WIDTH,
        heads,
        grid=grid,
        head_dim=DIM,
        kv_heads=kv_heads,
        init=Normal(0.4),
        out_init=Normal(0.4),
        sequence_parallel=sequence_parallel,
        **options,
    ).double()
    with torch.no_grad():  # biases that count, and norms that do something
        for name, parameter in layer.named_parameters():
            layout = layout_of(parameter)
            if parameter.dim() == 1:
                whole = torch.linspace(-0.5, 0.5, layout.shape[0], dtype=torch.float64) * len(name)
                parameter.add_(layout.shard(whole, grid.tensor.rank, grid.tensor.size))
    return layer


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return x, dy


def plain(w: dict[str, Tensor], x: Tensor, heads: int, kv_heads: int, documents: Tensor | None) -> Tensor:
    """Reference attention with torch's functions alone, from whole weights."""
    seen, places = visible(x[..., 0], documents)
    fused = "qkv.weight" in w
    first, second = ("qkv", "qkv") if fused else ("q", "kv")
    q = F.linear(x, w[f"{first}.weight"], w[f"{first}.bias"])[..., : heads * DIM]
    k, v = F.linear(x, w[f"{second}.weight"], w[f"{second}.bias"])[..., -2 * kv_heads * DIM :].chunk(2, dim=-1)
    q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in (q, k, v))
    q, k = rms_norm(q, w["q_norm.weight"], 1e-6), rms_norm(k, w["k_norm.weight"], 1e-6)
    q, k = Rope(DIM)(q, k, places)  # itself tested against transformers
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    return F.linear(attention(q, k, v, seen), w["out.weight"], w["out.bias"])


Case = tuple[int, int | None, bool, bool]  # heads, kv heads, sequence parallel, packed


def run_on_rank(size: int, cases: list[Case]) -> list[dict[str, Any]]:
    grid, found = Grid(tensor=size), []
    for heads, kv_heads, sequence_parallel, packed in cases:
        layer = made(grid, heads, kv_heads, sequence_parallel)
        x, dy = inputs()
        if sequence_parallel:
            here = slice(*split(LENGTH, size, grid.tensor.rank))
            x, dy = x[:, here].contiguous(), dy[:, here]
        x.requires_grad_()
        y = layer(x, DOCUMENTS if packed else None)
        y.backward(dy)
        named = dict(layer.named_parameters())
        found.append(
            {
                "y": y.detach(),
                "dx": x.grad,
                "heads": (layer.heads, layer.kv_heads),
                "weights": {name: p.detach() for name, p in named.items()},
                "grads": {name: p.grad for name, p in named.items()},
                "layouts": {name: layout_of(p) for name, p in named.items()},
            }
        )
    return found


def require_equal_to_plain(ranks: Any, size: int, cases: list[Case]) -> None:
    by_rank = ranks(size, run_on_rank, size, cases, timeout=120)
    for case, *found in zip(cases, *by_rank, strict=True):
        heads, kv_heads, sequence_parallel, packed = case
        kv = kv_heads or heads
        assert sum(f["heads"][0] for f in found) == heads
        layouts = found[0]["layouts"]
        weights = {name: layout.assemble([f["weights"][name] for f in found]) for name, layout in layouts.items()}
        for name, tensor in made(Grid(), heads, kv_heads).named_parameters():
            assert torch.equal(weights[name], tensor), (case, name)  # drawn alike on every grid
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        x, dy = inputs()
        x.requires_grad_()
        y = plain(leaves, x, heads, kv, DOCUMENTS if packed else None)
        y.backward(dy)
        for name, wanted in (("y", y.detach()), ("dx", x.grad)):
            if sequence_parallel:
                torch.testing.assert_close(torch.cat([f[name] for f in found], dim=1), wanted, **CLOSE)
            else:
                for f in found:
                    torch.testing.assert_close(f[name], wanted, **CLOSE, msg=f"{case} {name}: {{}}".format)
        for name, layout in layouts.items():
            parts = [f["grads"][name] for f in found]
            grad = sum(parts) if layout.partial else layout.assemble(parts)
            torch.testing.assert_close(grad, leaves[name].grad, **CLOSE, msg=f"{case} {name}: {{}}".format)


# Divided evenly; fewer kv heads than ranks; kv heads that the ranks do not divide; heads that straddle groups.
CASES: list[Case] = [
    (4, None, False, False),
    (4, None, True, True),
    (5, None, True, False),
    (7, None, False, True),
    (4, 4, True, False),
    (8, 4, False, True),
    (8, 2, True, False),
    (4, 1, False, True),
    (6, 3, True, True),
    (6, 2, False, False),
    (12, 6, True, True),
    (9, 3, False, False),
]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_attention_equals_plain_torch_for_some_head_ratios(ranks: Any, size: int) -> None:
    require_equal_to_plain(ranks, size, CASES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", range(1, 9))
def test_attention_equals_plain_torch_for_all_head_ratios(ranks: Any, size: int) -> None:
    cases: list[Case] = [
        (heads, kv_heads, sequence_parallel and LENGTH % size == 0, packed)
        for heads in range(size, 13)
        for kv_heads in [None, *(n for n in range(1, heads + 1) if heads % n == 0)]
        for sequence_parallel, packed in itertools.product([True, False], repeat=2)
    ]
    require_equal_to_plain(ranks, size, cases)


def whole_kv_on_rank(size: int) -> list[Any]:
    grid = Grid(tensor=size)
    found: list[Any] = []
    for heads, kv_heads in ((8, 4), (8, 2), (6, 3)):
        layer = made(grid, heads, kv_heads)
        layout = layout_of(layer.kv.weight)
        found.append((layout.sharded, layout.partial, layer.heads, layer.kv_heads, layer.kv.weight.shape[0]))
    return found


def test_a_rank_computes_only_the_keys_that_its_queries_look_at(ranks: Any) -> None:
    by_rank = ranks(4, whole_kv_on_rank, 4)
    assert [found[0] for found in by_rank] == [(True, False, 2, 1, 2 * DIM)] * 4
    assert [found[1] for found in by_rank] == [(False, True, 2, 1, 2 * 2 * DIM)] * 4
    # 6 heads are 1, 2, 1, 2 on 4 ranks, in groups of two: 0 | 0 1 | 1 | 2 2.
    assert [found[2][2:4] for found in by_rank] == [(1, 1), (2, 2), (1, 1), (2, 1)]


def test_attention_with_a_mask_works_on_the_meta_device() -> None:
    """Heads of k and v are repeated there; the meta device tells the shapes."""
    q, k = torch.empty(2, 6, 5, DIM, device="meta"), torch.empty(2, 3, 5, DIM, device="meta")
    mask = torch.empty(2, 1, 5, 5, device="meta")
    assert made(Grid(), 6, 3).attend(q, k, k, mask).shape == q.shape


# ---------------------------------------------------------------------------------------------------- hooks


def test_attention_calls_its_recompute_function_once() -> None:
    layer = made(Grid(), 4, 2)
    x, _ = inputs()
    wanted = layer(x, DOCUMENTS)
    calls = []

    def recompute(attend: Any, *tensors: Any) -> Tensor:
        calls.append([None if t is None else tuple(t.shape) for t in tensors])
        out: Tensor = attend(*tensors)
        return out

    layer.recompute = recompute
    assert torch.equal(layer(x, DOCUMENTS), wanted)
    q, kv = (ROWS, 4, LENGTH, DIM), (ROWS, 2, LENGTH, DIM)
    assert calls == [[q, kv, kv, (ROWS, LENGTH)]]
    assert SelfAttention.recompute is None and SelfAttention.cache is None


def test_attention_uses_the_positions_and_keys_of_a_cache() -> None:
    layer = made(Grid(), 4, 2)
    x, _ = inputs()
    wanted = layer(x)

    class Cache:
        """Everything at once, then the last token alone."""

        positions = torch.arange(LENGTH).expand(ROWS, -1)

        def attend(self, attention: SelfAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if q.shape[2] == LENGTH:
                self.k, self.v = k, v
                return attention.attend(q, k, v)
            k, v = torch.cat([self.k[:, :, :-1], k], dim=2), torch.cat([self.v[:, :, :-1], v], dim=2)
            return attention.attend(q, k, v, torch.zeros(1, 1, 1, LENGTH, dtype=q.dtype))

    layer.cache = Cache()
    torch.testing.assert_close(layer(x), wanted, **CLOSE)
    layer.cache.positions = torch.full((ROWS, 1), LENGTH - 1)
    torch.testing.assert_close(layer(x[:, -1:]), wanted[:, -1:], **CLOSE)


# ------------------------------------------------------------------------------------------ packed documents


def test_positions_start_at_0_in_each_document() -> None:
    assert positions_within(DOCUMENTS).tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 0]]
    _, places = visible(DOCUMENTS, DOCUMENTS)
    assert torch.equal(positions_within(DOCUMENTS), places)


def test_documents_are_cut_once_for_a_microbatch() -> None:
    documents = DOCUMENTS.clone()
    first = documents_of(documents)
    assert first is not None and documents_of(documents) is first
    documents[0, 3] = 0  # written in place: the documents of before are no longer its documents
    second = documents_of(documents)
    assert second is not None and second.numbers[0].tolist() == [0, 0, 0, 0, 1, 2, 2, 2]


def test_packed_rows_are_right_in_and_after_inference_mode() -> None:
    """Nothing that inference mode made is trained with, and its own tensors, which count no versions, keep nothing."""
    config = LlamaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12)
    module = PipelineModule(llama_layers(config), dtype=torch.float64, seed=1)
    ids, documents = torch.arange(2 * LENGTH).view(2, LENGTH) % 16, DOCUMENTS.clone()
    wanted = module((ids, documents.clone()))
    with torch.inference_mode():
        torch.testing.assert_close(module((ids, documents)), wanted, **CLOSE)
        own = DOCUMENTS.clone()
        torch.testing.assert_close(module((ids, own)), wanted, **CLOSE)
        own.zero_()
        torch.testing.assert_close(module((ids, own)), module((ids, torch.zeros_like(DOCUMENTS))), **CLOSE)
    outputs = module((ids, documents))
    torch.testing.assert_close(outputs, wanted, **CLOSE)
    parameters = list(module.parameters())
    found, plain = (torch.autograd.grad(y.square().sum(), parameters) for y in (outputs, wanted))
    torch.testing.assert_close(found, plain, **CLOSE)


def test_pack_fills_rows_with_texts_without_gaps() -> None:
    texts = [[1, 2, 3], [4], [], [5, 6, 7, 8, 9]]
    (ids, documents), labels = pack(texts, 4)
    assert ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 0, 0]]
    assert documents.tolist() == [[0, 0, 0, 1], [3, 3, 3, 3], [3, 4, 4, 4]]
    assert labels.tolist() == [[2, 3, -100, -100], [6, 7, 8, 9], [-100] * 4]
    check_documents(ids, documents)
    with pytest.raises(ValueError, match="the texts have 0 tokens, and a row has length=4"):
        pack([], 4)


def test_wrong_document_numbers_are_refused() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    check_documents(ids, None)
    check_documents(ids, torch.tensor([[0, 0, 1], [5, 5, 5]]))
    with pytest.raises(ValueError, match=r"are torch.int64 \(2, 2\), but must be integers of the shape \(2, 3\)"):
        check_documents(ids, ids[:, :2])
    with pytest.raises(ValueError, match=r"are torch.float32 \(2, 3\), but must be integers of the shape \(2, 3\)"):
        check_documents(ids, ids.float())
    with pytest.raises(ValueError, match=r"decrease along a row. Number the documents 0, 1, 2"):
        check_documents(ids, torch.tensor([[0, 1, 2], [0, 2, 1]]))


# ---------------------------------------------------------------------------------------- rotary positions


@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (1e4, None),
        (5e5, RopeScaling()),
        (5e5, RopeScaling(factor=32.0)),
        (1e2, RopeScaling(factor=4.0, low_freq_factor=0.5, high_freq_factor=2.0, original_max_position_embeddings=50)),
    ],
)
def test_rotary_angles_are_bitwise_those_of_transformers(theta: float, scaling: RopeScaling | None) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        parameters = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=10**6, rope_parameters=parameters
    )
    positions = torch.tensor([[0, 1, 2, 77, 4095, 100_000]])
    q, k = torch.randn(2, 1, 3, 6, 64)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    ours = Rope(64, theta, scaling)(q, k, positions)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# --------------------------------------------------------------------------------------------------- errors


def test_kv_heads_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_heads=4 does not divide heads=6. Give a divisor"):
        made(Grid(), 6, 4)


def refused_on_rank(size: int) -> str:
    return error_text(lambda: made(Grid(tensor=size), 3, None))


def test_attention_refuses_more_ranks_than_heads(ranks: Any) -> None:
    for message in ranks(4, refused_on_rank, 4):
        assert "but tensor=4 needs at least 4. Give tensor=3 at most" in message
