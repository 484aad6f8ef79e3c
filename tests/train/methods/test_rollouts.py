"""Rollouts on grids: answers, log-probabilities, advantages of one process; reward functions are called once."""

from __future__ import annotations

import asyncio
import math
import statistics
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import triax
from triax import AgreedError, Grid
from triax.inference.text import BYTES
from triax.train.methods import Rollouts, grpo_loss, with_reference
from triax.train.methods.rewards import Rewards, advantages

PROMPTS = [list(b"ab"), list(b"xyz "), list(b"q"), list(b"longer one")]
EOS = ord("e")
CONFIG = triax.LlamaConfig(
    vocab_size=128,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


def engine_of(grid: Grid, dtype: torch.dtype = torch.float64, beta: float = 0.0, **batch: Any) -> Any:
    options: Any = {"attention": "ring"} if grid.context.size > 1 else {}
    loss_fn = grpo_loss(grid, CONFIG.vocab_size, beta=beta, temperature=0.9)
    layers = triax.llama_layers(CONFIG, **options)
    module = triax.PipelineModule(layers, grid=grid, loss_fn=loss_fn, seed=0, dtype=dtype)
    for parameter in {id(p): p for p in module.parameters()}.values():
        parameter.data *= 12 if parameter.dim() > 1 else 1
    sizes: Any = {"size": 8, "microbatch": 2} | batch
    return triax.Engine(module, optimizer=partial(torch.optim.SGD, lr=0.1), batch=triax.Batch(**sizes))


def small(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[float]:
    return [sum(number < 64 for number in ids) / len(ids) for ids in completion_ids]


# ----------------------------------------------------------------------------------------------- the same on every grid


def two_steps(axes: dict[str, Any], dtype: torch.dtype) -> tuple[list[Any], list[Any], list[Any], dict[str, float]]:
    """Answers, this replica's rows and errors of two calls, of two steps each; and the last metrics."""
    engine = engine_of(Grid(**axes, timeout=60), dtype)
    rollouts = Rollouts(engine, triax.init_inference(engine, max_batch=5), small, group=4, max_new_tokens=7, eos=EOS)
    answers, rows, errors = [], [], []
    for _ in range(2):
        data = rollouts(PROMPTS)
        answers.append([(each.tokens, each.logprobs) for each in rollouts.completions])
        per_step = engine.batch.accumulation
        assert len(data) == 2 * per_step
        for first in (0, per_step):
            microbatches = data[first : first + per_step]
            mine = {"ids": torch.cat([ids for ids, _ in microbatches])}
            rows.append(mine | {key: torch.cat([labels[key] for _, labels in microbatches]) for key in data[0][1]})
            engine.train_batch(iter(microbatches))
            mean = engine.metrics["sampling/sampling_logp_difference/mean"]
            errors.append((mean, rollouts.largest_difference()))
    return answers, rows, errors, rollouts.metrics


@pytest.mark.parametrize(
    "grids",
    [
        [{"data": 2}, {"context": 2, "pipe": 2}],
        pytest.param([{"pipe": 2, "tensor": 2}, {"data": 2, "tensor": 2}], marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_rollouts_on_grids_equal_one_process(ranks: Any, grids: list[dict[str, int]]) -> None:
    (wanted,) = ranks(1, two_steps, {}, torch.float64)
    answers, rows, _, metrics = wanted
    assert answers[0] != answers[1] and len({tuple(tokens) for tokens, _ in answers[0]}) > 8
    for axes in grids:
        everyone = ranks(math.prod(axes.values()), two_steps, axes, torch.float64)
        for found in everyone:
            for mine, theirs in zip(found[0], answers, strict=True):
                assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in theirs]
                for (_, own), (_, other) in zip(mine, theirs, strict=True):
                    assert own == pytest.approx(other, abs=1e-10)
            assert found[3] == pytest.approx(metrics)
            for step in (0, 2):  # the first step after a draw
                assert found[2][step] == everyone[0][2][step] and found[2][step][1] < 1e-10
            assert found[2][1][1] > 1e-3  # the step after it has another policy
        replicas = [everyone[0][1]] if "data" not in axes else [everyone[0][1], everyone[len(everyone) // 2][1]]
        for step, whole in enumerate(rows):
            for name, values in whole.items():
                parts = torch.cat([replica[step][name] for replica in replicas])
                torch.testing.assert_close(parts, values, rtol=0, atol=1e-10, msg=name)


def test_rollout_rows_hold_tokens_log_probs_and_advantages() -> None:
    engine = engine_of(Grid())
    sampler = triax.init_inference(engine, max_batch=5)
    rollouts = Rollouts(engine, sampler, small, group=4, max_new_tokens=7, eos=EOS)
    data = rollouts(PROMPTS)
    ids = torch.cat([inputs for inputs, _ in data])
    labels, old, ahead = (torch.cat([each[key] for _, each in data]) for key in ("labels", "old", "advantages"))
    assert {len(each.logprobs) for each in rollouts.completions} > {7}  # some ended before
    values = small(None, None, [each.tokens[each.prompt :] for each in rollouts.completions])
    for row, done in enumerate(rollouts.completions):
        answer = range(done.prompt - 1, len(done.tokens) - 1)
        assert done.tokens[: done.prompt] == PROMPTS[row // 4]
        assert ids[row, : len(done.tokens) - 1].tolist() == done.tokens[:-1]
        assert (labels[row] != -100).nonzero()[:, 0].tolist() == list(answer)
        assert labels[row, list(answer)].tolist() == done.tokens[done.prompt :]
        assert old[row, list(answer)].tolist() == done.logprobs
        group = values[row // 4 * 4 : row // 4 * 4 + 4]
        wanted = (values[row] - statistics.mean(group)) / (statistics.stdev(group) + 1e-4)
        assert ahead[row].item() == pytest.approx(wanted, abs=1e-12)
    assert rollouts.metrics["reward"] == pytest.approx(statistics.mean(values))
    assert rollouts.metrics["reward_std"] == pytest.approx(statistics.stdev(values))
    # The same step, seed and prompts: the same answers. Another seed: others.
    assert [each.tokens for each in rollouts.completions] == [each.tokens for each in again(engine, sampler, 0)]
    assert [each.tokens for each in rollouts.completions] != [each.tokens for each in again(engine, sampler, 1)]


def again(engine: Any, sampler: Any, seed: int) -> list[Any]:
    rollouts = Rollouts(engine, sampler, small, group=4, max_new_tokens=7, eos=EOS, seed=seed)
    rollouts(PROMPTS)
    return rollouts.completions


def test_rollouts_report_the_log_prob_error_in_float32() -> None:
    _, _, errors, _ = two_steps({}, torch.float32)
    mean, most = errors[0]
    assert 0 < mean < most < 1e-4


def test_rollouts_report_how_log_probs_changed_since_the_draw() -> None:
    engine = engine_of(Grid())
    rollouts = Rollouts(engine, triax.init_inference(engine), small, group=4, max_new_tokens=7, eos=EOS)
    data, per_step, changes = rollouts(PROMPTS), engine.batch.accumulation, []
    engine.train_batch(iter(data[:per_step]))
    rollouts.largest_difference()  # of the first step
    for ids, labels in data[per_step:]:
        counts = labels["labels"] != -100
        with torch.no_grad():
            log_probs = (engine.module(ids) / 0.9).log_softmax(-1)  # at the temperature of the loss
        now = log_probs.gather(-1, labels["labels"].clamp(min=0)[..., None])[..., 0]
        changes.append((now - labels["old"])[counts].abs())
    engine.train_batch(iter(data[per_step:]))
    expected = torch.cat(changes)
    found = engine.metrics["sampling/sampling_logp_difference/mean"]
    assert found == pytest.approx(expected.mean().item(), rel=1e-10)
    assert rollouts.largest_difference() == pytest.approx(expected.max().item(), rel=1e-10)


# ------------------------------------------------------------------------------------------------ reward functions


def calls(fails: str) -> Any:
    """Number of calls on this rank, or the error; of functions of which one may fail."""
    engine, seen = engine_of(Grid(data=2, tensor=2, timeout=60)), []

    def first(prompts: Any, completions: Any, **_: Any) -> list[float]:
        seen.append(len(completions))
        return [1.0] * len(completions)

    def second(completions: Any, wanted: Any, trainer_state: Any, **_: Any) -> Any:
        seen.append(wanted)
        assert trainer_state.global_step == engine.global_steps
        if fails == "raises":
            raise KeyError("no such answer")
        return [0.5] if fails == "few" else ["much"] * 16 if fails == "text" else list(range(16))

    rollouts = Rollouts(engine, triax.init_inference(engine), [first, second], group=4, max_new_tokens=2)
    try:
        data = rollouts(PROMPTS, wanted=["a", "b", "c", "d"])
    except AgreedError as error:
        data = rollouts_after_failure(engine)
        return str(error)
    engine.train_batch(iter(data))
    return seen


def rollouts_after_failure(engine: Any) -> Any:
    """The job goes on after a function that failed."""
    data = Rollouts(engine, triax.init_inference(engine), small, group=4, max_new_tokens=2)(PROMPTS)
    engine.train_batch(iter(data))
    return data


def test_a_function_is_called_once_in_the_whole_job(ranks: Any) -> None:
    once = [16, [word for word in "abcd" for _ in range(4)]]
    assert ranks(4, calls, "") == [once, [], [], []]


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("raises", "the reward function second raised KeyError: 'no such answer'"),
        ("few", "the reward function second returned 1 values for 16 answers: return a list of one each"),
        ("text", "the reward function second returned 'much': return numbers, or None"),
    ],
)
def test_a_function_that_fails_is_named_on_every_rank(ranks: Any, fails: str, said: str) -> None:
    assert ranks(4, calls, fails) == [said] * 4


class Chat:
    """Tokenizer of bytes with a template for conversations."""

    eos_token_id = EOS

    def encode(self, text: str) -> list[int]:
        return BYTES.encode(text)

    def decode(self, ids: list[int]) -> str:
        return BYTES.decode(ids)

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool, return_dict: bool) -> list[int]:
        assert add_generation_prompt and not return_dict
        return BYTES.encode("".join(f"<{each['content']}>" for each in messages))


def test_functions_get_texts_conversations_or_ids_as_the_prompts_are() -> None:
    engine = engine_of(Grid())
    given: dict[str, Any] = {}

    async def judge(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        given.update(prompts=prompts, completions=completions, ids=completion_ids)
        return [float(len(each)) for each in completion_ids]

    sampler = triax.init_inference(engine, tokenizer=Chat())
    rollouts = Rollouts(engine, sampler, judge, group=4, max_new_tokens=7)
    text = ["ab", "xyz ", "q", "longer one"]
    rollouts(text)
    answers = [BYTES.decode([number for number in ids if number != EOS]) for ids in given["ids"]]
    assert any(EOS in ids for ids in given["ids"]) and given["completions"] == answers
    assert given["prompts"] == [each for each in text for _ in range(4)]
    first = given["ids"]
    rollouts(PROMPTS)  # the ids of the same texts
    assert given["ids"] == given["completions"] == first
    rollouts([[{"role": "user", "content": each}] for each in text])
    assert all(each == [{"role": "assistant", "content": each[0]["content"]}] for each in given["completions"])
    assert rollouts.completions[0].tokens[:4] == list(b"<ab>")


def test_answers_without_a_reward_are_left_out_of_means() -> None:
    def some(completions: Any, **_: Any) -> list[float | None]:
        return [None, 1.0, 2.0, None, 5.0, None]

    def others(completions: Any, **_: Any) -> list[float | None]:
        return [None, 4.0, None, 6.0, None, None]

    rewards = Rewards(Grid(), [some, others], [1.0, 0.5])
    values = rewards("abcdef", "abcdef", [[1]] * 6, {}, 0)
    total = rewards.total(values)
    assert total[1:5].tolist() == [3.0, 2.0, 3.0, 5.0] and total[[0, 5]].isnan().all()
    found = advantages(total, 3, "group").values
    std = statistics.stdev([3, 2]) + 1e-4
    assert found.tolist() == pytest.approx(
        [0, 0.5 / std, -0.5 / std, -1 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4), 0]
    )
    std = statistics.stdev([3, 2, 3, 5]) + 1e-4
    assert advantages(total, 3, "batch").values.tolist() == pytest.approx(
        [0, 0.5 / std, -0.5 / std, -1 / std, 1 / std, 0]
    )
    assert advantages(total, 3, "none").values.tolist() == pytest.approx([0, 0.5, -0.5, -1, 1, 0])


@pytest.mark.parametrize("make", [list, tuple, torch.tensor, np.array, "coroutine"])
def test_rewards_may_be_an_array_or_come_from_a_coroutine(make: Any) -> None:
    async def later(**_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [0.5, 2.0]

    async def notebook() -> Tensor:  # an event loop runs in the thread that calls the functions
        function = later if make == "coroutine" else lambda **_: make([0.5, 2.0])
        return Rewards(Grid(), function)("ab", "ab", [[1]] * 2, {}, 0)

    assert asyncio.run(notebook()).tolist() == [[0.5], [2.0]]


def test_a_failed_evaluation_keeps_the_last_rollouts() -> None:
    engine = engine_of(Grid())
    fails: list[bool] = []

    def reward(completions: Any, **_: Any) -> list[float]:
        if fails:
            raise KeyError("no such answer")
        return [1.0] * len(completions)

    rollouts = Rollouts(engine, triax.init_inference(engine), reward, group=4, max_new_tokens=2)
    rollouts(PROMPTS)
    completions, rows, metrics = rollouts.completions, rollouts.rows, rollouts.metrics
    rollouts.evaluate(PROMPTS[:1])
    fails.append(True)
    for call in (rollouts.evaluate, rollouts):
        with pytest.raises(AgreedError, match="no such answer"):
            call(PROMPTS)
    assert rollouts.completions is completions and rollouts.rows is rows and rollouts.metrics is metrics


# ------------------------------------------------------------------------------------------------ what is refused


def test_rollouts_refuse_mistakes() -> None:
    engine = engine_of(Grid())
    sampler = triax.init_inference(engine)
    make = partial(Rollouts, engine, sampler, small, max_new_tokens=4)
    rollouts = make(group=4)
    with pytest.raises(ValueError, match="3 prompts with 4 answers each are 12 rows, but a step takes 8"):
        rollouts(PROMPTS[:3])
    with pytest.raises(ValueError, match="wanted has 1 entries for 2 prompts"):
        rollouts(PROMPTS[:2], wanted=[1])
    with pytest.raises(ValueError, match="the prompt 'ab' is text: give init_inference a tokenizer"):
        rollouts(["ab", "cd"])
    with pytest.raises(ValueError, match="group=1: give a whole number of at least 2"):
        make(group=1)
    with pytest.raises(ValueError, match="there is no scale_rewards 'batches'; did you mean 'batch'"):
        make(scale_rewards="batches")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 weights were given for 1 reward functions"):
        make(weights=[1, 2])
    with pytest.raises(ValueError, match="give at least one, and each its own name"):
        Rollouts(engine, sampler, [small, small], max_new_tokens=4)
    with pytest.raises(TypeError, match="a reward function is a float"):
        Rollouts(engine, sampler, [1.0], max_new_tokens=4)  # type: ignore[list-item]
    other = engine_of(Grid())
    with pytest.raises(ValueError, match="the sampler has another model than the engine"):
        Rollouts(other, sampler, small, max_new_tokens=4)
    with pytest.raises(ValueError, match="a reference model was given, but the loss has beta=0"):
        make(reference=other)
    with_beta = engine_of(Grid(), beta=0.1)
    with pytest.raises(ValueError, match=r"the loss has beta=0\.1, the coefficient of the KL divergence"):
        Rollouts(with_beta, triax.init_inference(with_beta), small, max_new_tokens=4)
    plain = triax.PipelineModule(triax.llama_layers(CONFIG), loss_fn=triax.NextTokenLoss(Grid(), 128))
    trains = triax.Engine(plain, optimizer=torch.optim.AdamW, batch=8)
    with pytest.raises(TypeError, match="an engine whose loss_fn is a NextTokenLoss: make the model with"):
        Rollouts(trains, triax.init_inference(trains), small, max_new_tokens=4)
    with pytest.raises(TypeError, match=r"make the model with loss_fn=.*preference_loss"):
        with_reference(engine, [])
    with pytest.raises(ValueError, match="logprobs='tempered' divides the logits by the temperature, which is 0"):
        sampler.generate(PROMPTS, 2, temperature=0, logprobs="tempered")


def test_log_probs_at_a_temperature_are_of_divided_logits() -> None:
    engine = engine_of(Grid())
    sampler = triax.init_inference(engine, max_batch=3)
    for done in sampler.generate(PROMPTS, 5, temperature=0.6, logprobs="tempered"):
        with torch.no_grad():
            logits: Tensor = engine.module.run_stage(0, torch.tensor([done.tokens[:-1]]))[0, done.prompt - 1 :]
        wanted = (logits / 0.6).log_softmax(-1).gather(1, torch.tensor(done.tokens[done.prompt :])[:, None])[:, 0]
        assert done.logprobs == pytest.approx(wanted.tolist(), abs=1e-10)
