"""Streams of tokens: events, callbacks, pipeline stages at work, and refused uses."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax.base.errors import AgreedError
from triax.grid import Grid
from triax.inference.batching import Batcher, DecodeStep, Request, Token
from triax.inference.decode_loop import layers_with_cache
from triax.inference.engine import init_inference
from triax.models import DecoderConfig, DeltaNetSizes, decoder_layers
from triax.models.gpt import GPTLoss, gpt_layers
from triax.pipe.module import PipelineModule
from triax.testing.pool import slowdown

from support.generating_models import GPT, LIMITS, PROMPTS, model


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
def test_tokens_are_streamed_as_they_are_generated(ranks: Any, sizes: tuple[int, int, int]) -> None:
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


def test_only_the_last_token_of_a_prompt_passes_the_head() -> None:
    module, seen = model(GPT), []
    module.layers["5"].register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[:2])))
    module.layers["4"].register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[:2])))
    init_inference(module).generate([[1, 2, 3, 4], [5, 6, 7, 8]], 2)
    assert seen == [(2, 4), (2, 1), (2, 1), (2, 1)]


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


def test_pipeline_stages_generate_at_the_same_time(ranks: Any) -> None:
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
def test_a_second_stream_of_a_model_is_refused(ranks: Any, sizes: tuple[int, int, int]) -> None:
    for result in ranks(math.prod(sizes), overlapping, sizes):
        assert result["events"] == result["again"] == result["wanted"]
        assert len(result["said"]) == 24
        assert all("Finish or close the other stream first, list(stream) or" in said for said in result["said"])
        for training, around, caches in result["states"]:
            assert training and around is None and set(caches) <= {None}


def test_training_is_refused_while_a_stream_is_open() -> None:
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


def test_generate_works_after_a_callback_that_failed() -> None:
    engine = init_inference(model(GPT))

    def fails(request: int, token: int) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError) as caught:
        engine.generate(PROMPTS, 3, stream=fails)
    wanted = init_inference(model(GPT)).generate(PROMPTS, 3, seed=1)
    assert engine.generate(PROMPTS, 3, seed=1) == wanted
    assert str(caught.value) == "the disk is full"  # its traceback is kept until here


def test_generate_works_after_a_longer_call_that_failed() -> None:
    module = model(GPT)
    engine = init_inference(module)

    def fails(ids: Any, logits: Tensor) -> Tensor:
        if ids.shape[-1] == 7:
            raise OSError("the disk is full")
        return logits

    with pytest.raises(OSError, match="the disk is full"):
        engine.generate([[1, 2, 3]], 8, logits_processor=[fails])
    (tokens,) = engine.generate([[1, 2, 3]], 2, temperature=0)
    with torch.no_grad():
        plain = module.eval()(torch.tensor([tokens]))[0].argmax(-1)
    assert len(tokens) == 5 and plain[2:-1].tolist() == tokens[3:]


DELTA = DecoderConfig(
    vocab_size=53,
    max_position_embeddings=32,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=40,
    layer_types=("linear_attention", "full_attention"),
    linear_attention=DeltaNetSizes(4, 5, 2, 6),
)


@pytest.mark.parametrize("ending", ["read", "closed", "error"])
@pytest.mark.parametrize("name", ["layers.1.weight", "layers.0.weight"], ids=["positions", "tokens"])
def test_later_calls_are_right_after_a_failed_stream(name: str, ending: str) -> None:
    """Keys, values and states that were not finite met the sequences of later calls, with good weights again."""
    layers = gpt_layers(GPT) if name == "layers.1.weight" else decoder_layers(DELTA)
    module = PipelineModule(layers, dtype=torch.float64)
    engine, weight = init_inference(module, max_batch=4), module.get_parameter(name)
    good = weight.detach().clone()
    weight.data[7] = torch.nan  # the embedding of token or position 7

    def fails(ids: Any, logits: Tensor) -> Tensor:
        raise OSError("the disk is full")

    stream = engine.stream([[1, 2, 3], [7] * 12, [4] * 12], 3, logits_processor=[fails] if ending == "error" else ())
    if ending == "closed":
        next(stream)
        stream.close()
    else:
        with pytest.raises(OSError if ending == "error" else AgreedError):
            list(stream)
    weight.data.copy_(good)
    for tokens, prompt, _, logprobs, _ in engine.generate([[5, 6], [4], [1, 9, 8]], 6, temperature=0, logprobs=True):
        with torch.no_grad():
            plain = module.eval()(torch.tensor([tokens]))[0].log_softmax(-1)[prompt - 1 : -1]
        assert plain.argmax(-1).tolist() == tokens[prompt:]
        torch.testing.assert_close(logprobs, plain.max(-1).values.tolist(), rtol=0, atol=1e-10)


class Log:
    """Runs a batcher for prompts of given lengths and answers of given lengths, and records the steps of each."""

    def __init__(self, prompts: list[int], answers: list[int], *, slots: int, replicas: int, groups: int) -> None:
        requests = [Request(i, [9] * n, n + m, ()) for i, (n, m) in enumerate(zip(prompts, answers))]
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
def test_each_token_is_computed_once_without_waiting(slots: int, replicas: int, groups: int) -> None:
    lengths, limits = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]
    log = Log(lengths, limits, slots=slots, replicas=replicas, groups=groups)
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


def test_the_batcher_splits_prompts_evenly_over_groups() -> None:
    """Two stages, four prompts, room for eight: each group gets two, and no stage waits."""
    log = Log([2] * 4, [6] * 4, slots=8, replicas=1, groups=2)
    assert sorted(runs[0] for runs in log.runs) == [0, 0, 1, 1]
    assert log.steps == 2 * 6 + 1  # six tokens of each group in turn; at the last step, nothing is left


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
def test_streams_refuse_impossible_options(tokens: Any, options: dict[str, Any], message: str) -> None:
    engine = init_inference(model(GPT))
    with pytest.raises(ValueError, match=message):
        engine.generate(tokens, **{"max_new_tokens": 2, **options})


def test_init_inference_refuses_models_that_cannot_generate() -> None:
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
def test_an_error_of_generation_stops_every_rank(ranks: Any, what: str) -> None:
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
