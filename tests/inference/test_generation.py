"""Generation: the tokens of plain PyTorch's full forward, on every grid, in every batch; drawn as they should be."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import triax
from triax.base.errors import AgreedError
from triax.grid import Grid
from triax.inference.batching import Batcher, DecodeStep, Request, Token
from triax.inference.decode_loop import layers_with_cache
from triax.inference.engine import init_inference
from triax.inference.sampling import NOT_FINITE, Sampling, choose
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers
from triax.models.llama import LlamaConfig, llama_layers
from triax.pipe.module import PipelineModule

from processes import slowdown
from reference import gpt_logits

# Vocabularies that the tensor axis does not divide; fewer heads of keys and values than tensor ranks.
GPT = GPTConfig(vocab_size=53, max_position_embeddings=32, hidden_size=24, num_hidden_layers=3, num_attention_heads=4)
LLAMA = LlamaConfig(
    vocab_size=53,
    max_position_embeddings=32,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=1,
    intermediate_size=40,
)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [50] * 7, [11, 12, 13], [2, 1], [33] * 12, [0, 52, 0]]
LIMITS = [5, 9, 3, 12, 1, 20, 8, 10]
DRAWS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
]
GRIDS = [(1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 1, 2), (2, 2, 2), (1, 2, 1), (4, 1, 1), (1, 1, 4)]


def model(config: Any, grid: Grid | None = None, **options: Any) -> PipelineModule:
    sharded = options.pop("sequence_parallel", False)
    layers = gpt_layers(config, sharded) if isinstance(config, GPTConfig) else llama_layers(config, sharded)
    module = PipelineModule(layers, grid=grid, dtype=torch.float64, **options)
    for parameter in {id(p): p for p in module.parameters()}.values():
        parameter.data *= 5  # at their initial size, all logits are nearly alike
    return module


def generated(
    config: Any, grid: Grid, max_batch: int = 3, first: int = 0, **options: Any
) -> dict[str, list[list[int]]]:
    """Greedy, and drawn in each way, or from the way `first` on; of a variant in one."""
    engine = init_inference(model(config, grid, **options), max_batch=max_batch)
    draws = DRAWS[-1:] if options else [{"temperature": 0.0}, *DRAWS[first:]]
    return {str(draw): engine.generate(PROMPTS, LIMITS, seed=5, **draw) for draw in draws}


# ------------------------------------------------------------------------------------------------------ the tokens


def test_greedy_tokens_are_those_of_the_full_forward() -> None:
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


MORE = [pytest.param(sizes, marks=pytest.mark.exhaustive) for sizes in GRIDS[1:5] if sizes != (2, 2, 2)]


@pytest.mark.parametrize("sizes", [(2, 2, 2), *MORE], ids=lambda s: "x".join(map(str, s)))  # pipe x data x tensor
def test_every_grid_generates_the_same_tokens(ranks: Any, alone: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    # 8 ranks draw in the way that has every option.
    check_grid(ranks, alone, sizes, variants=math.prod(sizes) == 2, first=3 if math.prod(sizes) == 8 else 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", GRIDS[3:], ids=lambda s: "x".join(map(str, s)))
def test_every_other_grid_does_too(ranks: Any, alone: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    check_grid(ranks, alone, sizes, variants=True)


@pytest.mark.parametrize(
    ("sizes", "context"),
    [((2, 1, 1), 2), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (((1, 1, 1), 3), ((1, 2, 2), 2)))],
)
def test_prompts_in_parts_over_the_context_axis(
    ranks: Any, alone: dict[str, Any], sizes: tuple[int, int, int], context: int
) -> None:
    check_grid(ranks, alone, sizes, variants=False, context=context, first=3)


def check_grid(
    ranks: Any, alone: dict[str, Any], sizes: tuple[int, int, int], variants: bool, context: int = 1, first: int = 0
) -> None:
    for result in ranks(math.prod(sizes) * context, on_grid, sizes, variants, context, first, timeout=120):
        for name, drawn in result.items():
            for draw, sequences in drawn.items():
                assert sequences == alone[name.partition(",")[0]][draw], (name, draw)


def test_a_prompt_continues_as_if_it_were_alone() -> None:
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


def test_the_seed_decides_and_ends_end() -> None:
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


def test_the_model_is_as_it_was() -> None:
    module = model(GPT).train()
    module.layers["3"].eval()  # frozen, say
    before = {name: m.training for name, m in module.named_modules()}
    engine = init_inference(module)
    engine.generate(PROMPTS, 3)
    assert {name: m.training for name, m in module.named_modules()} == before
    assert module.run_hook is None and all(getattr(m, "cache", None) is None for m in module.modules())
    loss = GPTLoss(module.grid, GPT.vocab_size)(module(torch.ones(2, 5, dtype=torch.long)), torch.ones(2, 5).long())[0]
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    # A reader that leaves early leaves it so too, and its own code ran with gradients on.
    for token in engine.stream(PROMPTS, LIMITS):
        assert torch.is_grad_enabled()
        if token.position > 6:
            break
    del token
    assert all(getattr(m, "cache", None) is None for m in module.modules()) and module.training
    greedy = engine.generate(PROMPTS, LIMITS, temperature=0)
    assert greedy == init_inference(module).generate(PROMPTS, LIMITS, temperature=0)


# ------------------------------------------------------------------------------------------- training and streaming


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


@pytest.mark.parametrize(("sizes", "zero"), [((2, 2, 1), 1), ((1, 2, 2), 3)])
def test_between_the_steps_of_training(ranks: Any, sizes: tuple[int, int, int], zero: int) -> None:
    (wanted,) = ranks(1, trained, (1, 1, 1), 0)
    assert wanted["texts"][0] != wanted["texts"][2]
    for result in ranks(math.prod(sizes), trained, sizes, zero):
        assert result["texts"] == wanted["texts"]
        assert result["loss"] == pytest.approx(wanted["loss"], rel=1e-10)
        assert ("Pass the engine, triax.init_inference(engine, ...)" in result["refusal"]) == (zero == 3)


def streamed(sizes: tuple[int, int, int]) -> dict[str, Any]:
    grid = Grid(*sizes)
    engine = init_inference(model(GPT, grid), max_batch=2)
    events = list(engine.stream(PROMPTS, LIMITS, seed=5))
    called: list[tuple[int, int]] = []
    sequences = engine.generate(PROMPTS, LIMITS, seed=5, stream=lambda request, token: called.append((request, token)))
    for event in engine.stream(PROMPTS, LIMITS, seed=5):  # and to stop early
        if event == events[4]:
            break
    again = engine.generate(PROMPTS, LIMITS, seed=5)
    return {"events": events, "called": called, "sequences": sequences, "again": again}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 1)])
def test_tokens_come_as_they_are_made(ranks: Any, sizes: tuple[int, int, int]) -> None:
    results = ranks(math.prod(sizes), streamed, sizes)
    for rank, result in enumerate(results):
        events: list[Token] = result["events"]
        assert events == results[0]["events"]
        assert result["called"] == ([(e.request, e.token) for e in events] if rank == 0 else [])
        assert result["again"] == result["sequences"]
        for request, (prompt, sequence) in enumerate(zip(PROMPTS, result["sequences"])):
            mine = [event for event in events if event.request == request]
            assert prompt + [event.token for event in mine] == sequence
            assert [event.position for event in mine] == list(range(len(prompt), len(sequence)))
            assert [event.last for event in mine] == [False] * (len(mine) - 1) + [True]
    # They come while others are still to begin: the last prompt's first token is behind the first one's last.
    places = [(event.request, event.last) for event in results[0]["events"]]
    assert places.index((0, True)) < [request for request, _ in places].index(7)


def test_a_prompt_meets_the_head_with_its_last_token_alone() -> None:
    module, seen = model(GPT), []
    module.layers["5"].register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[:2])))
    module.layers["4"].register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[:2])))
    init_inference(module).generate([[1, 2, 3, 4], [5, 6, 7, 8]], 2)
    assert seen == [(2, 4), (2, 1), (2, 1), (2, 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_another_precision(dtype: torch.dtype) -> None:
    engine = init_inference(model(LLAMA), dtype=dtype, max_batch=2)
    sequences = engine.generate(PROMPTS, LIMITS, top_k=20, seed=5)
    assert [len(s) for s in sequences] == [len(p) + n for p, n in zip(PROMPTS, LIMITS)]
    assert engine.cache.bytes == 2 * 3 * 2 * 1 * 22 * 6 * dtype.itemsize  # the longest takes 22 places
    assert engine.generate(PROMPTS, LIMITS, top_k=20, seed=5) == sequences


def busy(sizes: tuple[int, int, int], seconds: float) -> list[tuple[float, float]]:
    """Times at which this rank's stage computed; each computation sleeps for some time."""
    grid = Grid(*sizes)
    module, spans = model(GPT, grid), []

    def work(*_: object) -> None:
        begin = time.monotonic()
        time.sleep(seconds)
        spans.append((begin, time.monotonic()))

    next(m for name, m in module.named_modules() if name.endswith("attention")).register_forward_pre_hook(work)
    init_inference(module, max_batch=4).generate([[1, 2]] * 4, 15, temperature=0)
    return spans


def test_stages_work_at_the_same_time(ranks: Any) -> None:
    first, second = ranks(2, busy, (2, 1, 1), 0.008 * slowdown())
    assert len(first) == len(second) == 30  # 2 groups of 2 sequences, 15 turns each
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)
    assert both > 0.5 * sum(stop - start for start, stop in first)


def overlapping(sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Streams of one model that overlap, and what comes of the first one."""
    engine = init_inference(model(GPT, Grid(*sizes)).train())
    other = init_inference(engine.module)
    wanted = list(engine.stream(PROMPTS[:2], 6))
    said, events, late = [], [], other.stream(PROMPTS[:1], 20)
    stream = engine.stream(PROMPTS[:2], 6)
    for event in stream:
        events.append(event)
        for inner in (engine, other):
            with pytest.raises(AgreedError) as caught:
                inner.generate(PROMPTS[2:5], 12)
            said.append(str(caught.value))
    assert len(list(late)) == 20  # it was asked for before, and begins when it is read
    stream = engine.stream(PROMPTS[:2], 6)
    next(stream)
    stream.close()
    states = [(engine.module.training, engine.module.run_hook, [m.cache for m in layers_with_cache(engine.module)])]
    try:
        for _ in engine.stream(PROMPTS[:2], 6):
            raise OSError("in the loop")
    except OSError as error:
        kept = error  # with its traceback
    states.append((engine.module.training, engine.module.run_hook, [m.cache for m in layers_with_cache(engine.module)]))
    again = list(engine.stream(PROMPTS[:2], 6))
    return {"wanted": wanted, "events": events, "again": again, "said": said, "states": states, "kept": str(kept)}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1)])
def test_a_stream_has_the_model_to_itself(ranks: Any, sizes: tuple[int, int, int]) -> None:
    for result in ranks(math.prod(sizes), overlapping, sizes):
        assert result["events"] == result["again"] == result["wanted"]
        assert len(result["said"]) == 24
        assert all("Finish or close the other stream first, list(stream) or" in said for said in result["said"])
        for training, around, caches in result["states"]:
            assert training and around is None and set(caches) <= {None}


def test_the_model_is_refused_while_a_stream_has_it() -> None:
    engine = triax.initialize(
        model=PipelineModule(gpt_layers(GPT), loss_fn=GPTLoss(Grid(), GPT.vocab_size), dtype=torch.float64),
        config={"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )[0]
    generator, x = init_inference(engine), torch.ones(1, 9, dtype=torch.long)
    wanted = list(generator.stream(PROMPTS, LIMITS))
    stream = generator.stream(PROMPTS, LIMITS)
    events = [next(stream)]
    for use in (lambda: engine.train_batch(iter([(x, x)])), lambda: engine.module(x)):
        with pytest.raises(RuntimeError, match=r"while a stream of tokens uses its cache. Finish or close that stream"):
            use()
    assert events + list(stream) == wanted and engine.module.training
    assert math.isfinite(float(engine.train_batch(iter([(x, x)]))))


def test_a_callback_that_fails_lets_go_of_the_model() -> None:
    engine = init_inference(model(GPT))

    def fails(request: int, token: int) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError) as caught:
        engine.generate(PROMPTS, 3, stream=fails)
    assert engine.generate(PROMPTS[:1], 1) and caught.value  # whose traceback is kept


def test_ends_may_be_tensors() -> None:
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


# ------------------------------------------------------------------------------------------------------- the plan


class Log:
    """Runs a batcher with a given number of tokens for each request, and records the steps of each."""

    def __init__(self, lengths: list[int], limits: list[int], slots: int, replicas: int, groups: int) -> None:
        requests = [Request(i, [9] * n, n + m, ()) for i, (n, m) in enumerate(zip(lengths, limits))]
        batcher = Batcher(requests, slots=slots, replicas=replicas, groups=groups, ends=lambda ids: False)
        steps: list[DecodeStep] = []
        self.runs: list[list[int]] = [[] for _ in requests]
        self.computed = self.steps = 0
        while not batcher.done:
            step = batcher.plan(len(steps))
            steps.append(step)
            places = set()
            for replica, forwards in enumerate(step.forwards):
                for forward in forwards:
                    assert len({len(tokens) for tokens in forward.tokens}) == 1
                    for request, slot, start, tokens in zip(
                        forward.requests, forward.slots, forward.starts, forward.tokens
                    ):
                        assert start + len(tokens) == len(request.tokens) and 0 <= slot < slots
                        assert (replica, slot) not in places
                        places.add((replica, slot))
                        self.runs[request.index].append(len(steps) - 1)
                        self.computed += len(tokens)
            if len(steps) >= groups:  # the oldest running step is done
                done = steps[-groups]
                batcher.append(done, [[[9]] * len(done.rows(r)) for r in range(replicas)] if done.forwards else [])
        self.steps = len(steps)


@pytest.mark.parametrize(
    ("slots", "replicas", "groups"), [(1, 1, 1), (3, 1, 1), (2, 2, 1), (4, 1, 2), (3, 2, 2), (1, 2, 4)]
)
def test_nothing_is_computed_twice_and_nobody_waits_for_others(slots: int, replicas: int, groups: int) -> None:
    lengths, limits = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]
    log = Log(lengths, limits, slots, replicas, groups)
    assert [len(runs) for runs in log.runs] == limits
    # Each token of each sequence once, but for the last, which nobody needs: no padding.
    assert log.computed == sum(lengths) + sum(limits) - len(limits)
    for runs in log.runs:  # once it has begun, at every turn of its group
        assert runs == list(range(runs[0], runs[-1] + 1, groups))
    if groups == 1:
        places = slots * replicas
        for i in range(places, len(log.runs)):  # a place that is free is taken at the next turn
            ended = sorted(runs[-1] for runs in log.runs[:i])
            assert log.runs[i][0] == ended[-places] + 1


def test_groups_share_the_work() -> None:
    """Two stages, four prompts, room for eight: each group gets two, and no stage waits."""
    log = Log([2] * 4, [6] * 4, 8, 1, 2)
    assert sorted(runs[0] for runs in log.runs) == [0, 0, 1, 1]
    assert log.steps == 13  # at the last one, nothing is left


# ------------------------------------------------------------------------------------------------------- the draws


def drawn(logits: Tensor, count: int, sampling: Sampling) -> Tensor:
    """Return the frequency of each token in ``count`` draws."""
    keys = [(7, 0, position) for position in range(count)]
    tokens = choose(logits.expand(count, -1), sampling, keys, axis=Grid().tensor, vocab_size=logits.shape[-1])
    return tokens[:, 0].bincount(minlength=logits.shape[-1]) / count


def test_tokens_come_as_often_as_they_should() -> None:
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


def choices(size: int) -> list[list[int]]:
    grid = Grid(tensor=size)
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(4)).mul(3).bfloat16()  # with many ties
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


def test_a_shared_vocabulary_gives_the_same_choice(ranks: Any) -> None:
    (wanted,) = ranks(1, choices, 1)
    greedy = torch.randn(40, 50, generator=torch.Generator().manual_seed(4)).mul(3).bfloat16().float()
    assert wanted[0] == greedy.argmax(-1).tolist()  # the first of equal ones
    for size in (3, 4):  # 50 over 3: 16, 17, 17; over 4: 12, 13, 12, 13
        assert ranks(size, choices, size) == [wanted] * size


def test_what_is_not_finite_is_no_token() -> None:
    logits = torch.zeros(4, 5)
    logits[0, 2], logits[1, 3], logits[2, :] = torch.nan, torch.inf, -torch.inf
    logits[3, 1:] = -torch.inf
    for sampling in (Sampling(0.0), Sampling(), Sampling(1.0, 2), Sampling(1.0, None, 0.9)):
        chosen = choose(logits, sampling, [(0, i) for i in range(4)], axis=Grid().tensor, vocab_size=5)[:, 0]
        assert chosen.tolist() == [NOT_FINITE] * 3 + [0]


# ------------------------------------------------------------------------------------------------------ the errors


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([[1] * 30], {"max_new_tokens": 3}, "gets 3 new ones, which makes 33, but max_length is 32. Shorten"),
        ([[1], []], {}, "prompt 1 is empty. Give it at least one token"),
        ([[1, 53]], {}, "prompt 0 has ids from 1 to 53, but the vocabulary goes from 0 to 52"),
        ([1, 2, 3], {}, r"must be a list of prompts, each a list of ids. Write generate\(\[\[1, 2, 3\]\], ...\)"),
        ([torch.zeros(1, 3)], {}, r"a prompt is torch.float32 of shape \(1, 3\). Give a 1-d tensor of integers"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0 for prompt 0. Give at least 1"),
        ([[1]], {"max_new_tokens": [1, 2]}, "max_new_tokens has 2 entries for 1 prompts. Give one for each"),
        ([[1]], {"seed": [1, 2]}, "seed has 2 entries for 1 prompts"),
        ([[1]], {"temperature": -1.0}, r"temperature is -1.0. Give 0 \(the most likely token\) or at least 1e-6"),
        ([[1]], {"top_k": 0}, "top_k is 0. Give at least 1"),
        ([[1]], {"top_p": 1.5}, r"top_p is 1.5. Give a probability in \(0, 1\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(tokens: Any, options: dict[str, Any], message: str) -> None:
    engine = init_inference(model(GPT))
    with pytest.raises(ValueError, match=message):
        engine.generate(tokens, **{"max_new_tokens": 2, **options})


def test_models_that_cannot_generate() -> None:
    module = model(GPT)
    with pytest.raises(ValueError, match=r"max_length is 33, but the model has 32 positions. Pass max_length=32"):
        init_inference(module, max_length=33)
    with pytest.raises(ValueError, match=r"max_batch is 0. Give at least 1"):
        init_inference(module, max_batch=0)
    with pytest.raises(ValueError, match="no layer of the model has the attribute `cache`"):
        init_inference(PipelineModule([torch.nn.Linear(3, 3)]))
    with pytest.raises(TypeError, match="model is a Linear, not a PipelineModule or its training engine"):
        init_inference(torch.nn.Linear(3, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"have no values yet. Call model.fill\(\)"):
        init_inference(PipelineModule(gpt_layers(GPT), device="meta"))
    module.get_parameter("layers.3.mlp.up.weight").data.fill_(torch.nan)
    with pytest.raises(AgreedError, match=r"the logits for token 1 of prompt 1 are not finite. Look for nan"):
        init_inference(module).generate(PROMPTS, 3)
    assert init_inference(model(GPT), dtype=torch.float32, max_length=9).generate([[1]], 3)


def failing(what: str) -> list[str]:
    grid = Grid(pipe=2)
    module = model(GPT, grid)
    engine = init_inference(module)
    said = []
    prompts, stream = PROMPTS, None
    if what == "nan" and grid.rank == 1:
        module.get_parameter("layers.5.weight").data.fill_(torch.nan)
    elif what == "prompts" and grid.rank == 1:
        prompts = PROMPTS[1:]
    elif what == "callback":

        def stream(request: int, token: int) -> None:
            raise OSError("the disk is full")

    elif what == "layer" and grid.rank == 1:
        module.layers["5"].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        engine.generate(prompts, 6, stream=stream)
    except (RuntimeError, ValueError) as error:
        said.append(str(error))
    if what in ("nan", "prompts"):  # everybody said so, and can go on
        if what == "nan" and grid.rank == 1:
            module.get_parameter("layers.5.weight").data.fill_(1.0)
        said.append(str(engine.generate(PROMPTS[:1], 1)))
    return said


@pytest.mark.parametrize("what", ["nan", "prompts", "callback", "layer"])
def test_no_rank_is_left_waiting(ranks: Any, what: str) -> None:
    first, second = ranks(2, failing, what)
    if what == "nan":
        assert first == second and "token 1 of prompt 1 are not finite" in first[0]
    elif what == "prompts":
        assert first == second
        assert first[0] == "the ranks got different prompts or options. Pass the same on every rank."
    elif what == "callback":
        assert first == ["rank 0 (pipe 0, data 0, tensor 0) failed at generate: OSError: the disk is full"]
        assert "rank 1" in second[0]
    else:
        assert "rank 1" in second[0] and "ZeroDivisionError: division by zero" in second[0]
        assert "rank 0" in first[0]
