"""Generation: the tokens of plain PyTorch's full forward, on every grid and in every batch; sampled frequencies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import triax
from triax.grid import Grid
from triax.inference.engine import init_inference
from triax.inference.sampling import NOT_FINITE, Sampling, choose
from triax.models.gpt import GPTLoss, gpt_layers
from triax.pipe.module import PipelineModule

from support.generating_models import GPT, LIMITS, LLAMA, PROMPTS, model
from support.reference import gpt_logits

DRAWS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
]


GRIDS = [(1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 1, 2), (2, 2, 2), (1, 2, 1), (4, 1, 1), (1, 1, 4)]


def generated(
    config: Any, grid: Grid, max_batch: int = 3, first: int = 0, **options: Any
) -> dict[str, list[list[int]]]:
    """Greedy, and drawn in each way, or from the way `first` on; of a variant in one."""
    engine = init_inference(model(config, grid, **options), max_batch=max_batch)
    draws = DRAWS[-1:] if options else [{"temperature": 0.0}, *DRAWS[first:]]
    return {str(draw): engine.generate(PROMPTS, LIMITS, seed=5, **draw) for draw in draws}


def test_greedy_tokens_equal_those_of_the_full_forward() -> None:
    module = model(GPT)
    weights = {name: p.detach() for name, p in module.named_parameters()}
    sequences = init_inference(module, max_batch=3).generate(PROMPTS, LIMITS, temperature=0)
    for prompt, limit, sequence in zip(PROMPTS, LIMITS, sequences):
        ids = list(prompt)
        for _ in range(limit):
            ids.append(
                int(
                    gpt_logits(weights, torch.tensor([ids]), GPT.num_hidden_layers, GPT.num_attention_heads)[
                        0, -1
                    ].argmax()
                )
            )
        assert sequence == ids


def on_grid(sizes: tuple[int, int, int], variants: bool = True, context: int = 1, first: int = 0) -> dict[str, Any]:
    grid = Grid(*sizes, context=context)
    results: dict[str, Any] = {
        "gpt": generated(GPT, grid, first=first),
        "llama": generated(LLAMA, grid, max_batch=2, first=first),
    }
    if sizes[2] > 1 and variants:
        # One token cannot be shared out over the tensor axis: it is not, and the model is as it was afterwards.
        results["gpt, sequence parallel"] = generated(GPT, grid, sequence_parallel=True)
        results["llama, sequence parallel"] = generated(LLAMA, grid, sequence_parallel=True)
    if sizes[0] == 2 and variants:
        for placement in ("loop", "v"):
            results[f"gpt, {placement}"] = generated(GPT, grid, chunks=2, placement=placement)
    return results


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return on_grid((1, 1, 1))


MORE = [pytest.param(sizes, marks=pytest.mark.exhaustive) for sizes in GRIDS[2:5]]


@pytest.mark.parametrize(
    "sizes", [(1, 2, 2), (2, 1, 1), *MORE], ids=lambda s: "x".join(map(str, s))
)  # pipe x data x tensor
def test_every_grid_generates_the_tokens_of_one_process(
    ranks: Any, alone: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    # 4 and 8 ranks draw in the way that has every option.
    require_tokens_of_one_process(
        ranks, alone, sizes, variants=math.prod(sizes) == 2, first=3 if math.prod(sizes) > 2 else 0
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", GRIDS[3:], ids=lambda s: "x".join(map(str, s)))
def test_more_grids_generate_the_tokens_of_one_process(
    ranks: Any, alone: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    require_tokens_of_one_process(ranks, alone, sizes, variants=True)


@pytest.mark.parametrize(
    ("sizes", "context"),
    [((2, 1, 1), 2), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (((1, 1, 1), 3), ((1, 2, 2), 2)))],
)
def test_context_axis_generates_the_tokens_of_one_process(
    ranks: Any, alone: dict[str, Any], sizes: tuple[int, int, int], context: int
) -> None:
    require_tokens_of_one_process(ranks, alone, sizes, variants=False, context=context, first=3)


def require_tokens_of_one_process(
    ranks: Any, alone: dict[str, Any], sizes: tuple[int, int, int], variants: bool, context: int = 1, first: int = 0
) -> None:
    for result in ranks(math.prod(sizes) * context, on_grid, sizes, variants, context, first, timeout=120):
        for name, drawn in result.items():
            for draw, sequences in drawn.items():
                assert sequences == alone[name.partition(",")[0]][draw], (name, draw)


def test_a_prompt_gets_the_same_tokens_in_any_batch() -> None:
    """A queue over few places, all at once, and one by one."""
    module = model(GPT)
    seeds = list(range(40, 40 + len(PROMPTS)))
    for draw in ({"temperature": 0.0}, *DRAWS):
        one = init_inference(module)
        wanted = [one.generate([p], n, seed=s, **draw)[0] for p, n, s in zip(PROMPTS, LIMITS, seeds)]
        assert len({tuple(sequence) for sequence in wanted}) == len(PROMPTS)
        for places in (1, 2, 3, 8):
            engine = init_inference(module, max_batch=places)
            assert engine.generate(PROMPTS, LIMITS, seed=seeds, **draw) == wanted
        backwards = engine.generate(PROMPTS[::-1], LIMITS[::-1], seed=seeds[::-1], **draw)
        assert backwards[::-1] == wanted


def test_the_seed_sets_the_tokens_and_eos_ends_them() -> None:
    engine = init_inference(model(GPT), max_batch=4)
    first = engine.generate(PROMPTS, LIMITS, seed=1)
    assert engine.generate(PROMPTS, LIMITS, seed=1) == first != engine.generate(PROMPTS, LIMITS, seed=2)
    # Two prompts that are alike differ in their draws.
    same = engine.generate([[7, 8]] * 3, 12)
    assert len({tuple(sequence) for sequence in same}) == 3
    assert engine.generate([torch.tensor(prompt) for prompt in PROMPTS], LIMITS, seed=1) == first
    for eos in (first[3][9], [first[3][9], first[5][4]]):
        ends = {eos} if isinstance(eos, int) else set(eos)
        for prompt, whole, cut in zip(PROMPTS, first, engine.generate(PROMPTS, LIMITS, seed=1, eos=eos)):
            stop = next((i for i in range(len(prompt), len(whole)) if whole[i] in ends), len(whole) - 1)
            assert cut == whole[: stop + 1]
    assert engine.generate([], 3) == []


def caches(module: PipelineModule) -> list[Any]:
    """Return the KV cache that each attention or position layer has, or None."""
    return [layer.cache for layer in module.modules() if hasattr(layer, "cache")]


def test_generation_leaves_modes_and_hooks_unchanged() -> None:
    """A module in training mode, with one layer in evaluation mode, is as before, and can be trained."""
    module = model(GPT).train()
    module.layers["3"].eval()
    before = {name: layer.training for name, layer in module.named_modules()}
    init_inference(module).generate(PROMPTS, 3)
    assert {name: layer.training for name, layer in module.named_modules()} == before
    assert module.run_hook is None
    assert caches(module) == [None] * (1 + GPT.num_hidden_layers)  # the positions, and each block's attention
    ids = torch.ones(2, 5, dtype=torch.long)
    GPTLoss(module.grid, GPT.vocab_size)(module(ids), ids)[0].backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_stream_that_is_left_early_restores_the_module() -> None:
    """The body of the loop over the tokens runs with gradients on; the engine can be used again afterwards."""
    module = model(GPT).train()
    engine = init_inference(module)
    for token in engine.stream(PROMPTS, LIMITS):
        assert torch.is_grad_enabled()
        if token.position > 6:
            assert any(cache is not None for cache in caches(module)) and not module.training
            break
    del token
    assert caches(module) == [None] * (1 + GPT.num_hidden_layers) and module.training
    again = engine.generate(PROMPTS, LIMITS, temperature=0)
    assert again == init_inference(model(GPT)).generate(PROMPTS, LIMITS, temperature=0)


def trained(sizes: tuple[int, int, int], zero: int) -> dict[str, Any]:
    """Generate between the steps of a training engine."""
    grid = Grid(*sizes)
    module = PipelineModule(gpt_layers(GPT), grid=grid, loss_fn=GPTLoss(grid, GPT.vocab_size), dtype=torch.float64)
    engine = triax.initialize(
        model=module,
        config={
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 2.0}},
            "zero_optimization": {"stage": zero},
        },
    )[0]
    text = torch.randint(53, (1, 9), generator=torch.Generator().manual_seed(1))
    batches = iter(lambda: (text[:, :-1], text[:, 1:]), None)
    generator = init_inference(engine, max_batch=2)
    refusal = ""
    if zero == 3:
        with pytest.raises(ValueError) as caught:
            init_inference(module)
        refusal = str(caught.value)
    with pytest.raises(ValueError, match="would change the weights that this engine trains"):
        init_inference(engine, dtype=torch.float32)
    texts = []
    for _ in range(3):
        texts.append(generator.generate(PROMPTS[:4], 6, temperature=0))
        loss = engine.train_batch(batches)
    return {"texts": texts, "loss": float(loss), "refusal": refusal}


@pytest.mark.parametrize(
    ("sizes", "zero"), [((2, 1, 1), 1), ((1, 2, 2), 3), pytest.param((2, 2, 1), 1, marks=pytest.mark.exhaustive)]
)
def test_generation_between_training_steps_equals_one_process(
    ranks: Any, sizes: tuple[int, int, int], zero: int
) -> None:
    (wanted,) = ranks(1, trained, (1, 1, 1), 0)
    assert wanted["texts"][0] != wanted["texts"][2]
    for result in ranks(math.prod(sizes), trained, sizes, zero):
        assert result["texts"] == wanted["texts"]
        assert result["loss"] == pytest.approx(wanted["loss"], rel=1e-10)
        assert ("Pass the engine, triax.init_inference(engine, ...)" in result["refusal"]) == (zero == 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_narrow_dtype_generates_and_fills_its_cache(dtype: torch.dtype) -> None:
    engine = init_inference(model(LLAMA), dtype=dtype, max_batch=2)
    sequences = engine.generate(PROMPTS, LIMITS, top_k=20, seed=5)
    assert [len(s) for s in sequences] == [len(p) + n for p, n in zip(PROMPTS, LIMITS)]
    assert engine.cache.bytes == 2 * 3 * 2 * 1 * 22 * 6 * dtype.itemsize  # the longest takes 22 places
    assert engine.generate(PROMPTS, LIMITS, top_k=20, seed=5) == sequences


def test_eos_takes_ints_tensors_and_iterables() -> None:
    engine = init_inference(model(GPT))
    whole = engine.generate(PROMPTS[:1], 9, temperature=0)[0]
    end = whole[5]
    wanted = engine.generate(PROMPTS[:1], 9, temperature=0, eos=end)
    assert len(wanted[0]) < len(whole)
    ways: list[Any] = [torch.tensor(end), torch.tensor([end]), [torch.tensor(end)], np.int64(end), np.array([end])]
    for eos in (*ways, np.array(end), (np.int32(end), end), {end}, iter([end]), range(end, end + 1)):
        assert engine.generate(PROMPTS[:1], 9, temperature=0, eos=eos) == wanted, eos
    wrong: list[Any] = [torch.tensor([1.0]), 2.0, "end", ["a"], [None], True, torch.tensor([[1]])]
    for eos in wrong:
        with pytest.raises(ValueError, match=r"not an integer. Give one id or a list of ids"):
            engine.generate(PROMPTS[:1], 9, eos=eos)


def drawn(logits: Tensor, count: int, sampling: Sampling) -> Tensor:
    """Return the frequency of each token in ``count`` draws."""
    keys = [(7, 0, position) for position in range(count)]
    tokens = choose(logits.expand(count, -1), sampling, keys, axis=Grid().tensor, vocab_size=logits.shape[-1])
    return tokens[:, 0].bincount(minlength=logits.shape[-1]) / count


def test_sampled_frequencies_match_the_probabilities() -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2
    for sampling in (
        Sampling(),
        Sampling(0.6),
        Sampling(1.0, top_k=4),
        Sampling(2.0, top_p=0.7),
        Sampling(1.5, 6, 0.8),
    ):
        scaled = logits / sampling.temperature
        order = scaled.argsort(descending=True)
        keep = order[: sampling.top_k or 12]
        if sampling.top_p is not None:
            chances = scaled[keep].softmax(-1)
            inside = [i for i in range(len(keep)) if float(chances[:i].sum()) < sampling.top_p]
            keep = keep[inside]
        wanted = torch.zeros(12, dtype=torch.float64)
        wanted[keep] = scaled[keep].softmax(-1)
        count = 20000
        found = drawn(logits, count, sampling)
        assert (found[wanted == 0] == 0).all()
        sigma = (wanted * (1 - wanted) / count).sqrt()
        assert ((found - wanted).abs() <= 4 * sigma + 1e-12).all(), sampling


def tied_logits() -> Tensor:
    """Logits (40, 50) in whole numbers: in many rows the likeliest tokens are several, on several ranks."""
    return torch.randn(40, 50, generator=torch.Generator().manual_seed(4)).round().bfloat16()


def choices(size: int) -> list[list[int]]:
    grid = Grid(tensor=size)
    logits = tied_logits()
    mine = logits.tensor_split([50 * rank // size for rank in range(1, size)], dim=-1)[grid.tensor.rank]
    keys = [(1, i) for i in range(40)]
    ways = [
        Sampling(0.0),
        Sampling(),
        Sampling(1.0, 3),
        Sampling(1.0, 30),
        Sampling(1.0, None, 0.5),
        Sampling(2.0, 9, 0.9),
    ]
    return [choose(mine, way, keys, axis=grid.tensor, vocab_size=50)[:, 0].tolist() for way in ways]


def test_a_sharded_vocabulary_chooses_the_same_tokens(ranks: Any) -> None:
    """Of equally likely tokens the greedy choice is the first, and top-k and top-p keep all, on any number of ranks."""
    (wanted,) = ranks(1, choices, 1)
    rows = tied_logits().tolist()
    assert wanted[0] == [row.index(max(row)) for row in rows]
    halves = [(max(row[:25]), max(row[25:])) for row in rows]
    assert sum(first == second for first, second in halves) > 10
    for size in (3, 4):  # 50 over 3: 16, 17, 17; over 4: 12, 13, 12, 13
        assert ranks(size, choices, size) == [wanted] * size


def test_logits_that_are_not_finite_give_no_token() -> None:
    logits = torch.zeros(4, 5)
    logits[0, 2], logits[1, 3], logits[2, :] = torch.nan, torch.inf, -torch.inf
    logits[3, 1:] = -torch.inf
    for sampling in (Sampling(0.0), Sampling(), Sampling(1.0, 2), Sampling(1.0, None, 0.9)):
        chosen = choose(logits, sampling, [(0, i) for i in range(4)], axis=Grid().tensor, vocab_size=5)[:, 0]
        assert chosen.tolist() == [NOT_FINITE] * 3 + [0]
