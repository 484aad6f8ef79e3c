"""Training files with ``method: grpo``: the functions of ``triax.methods`` on one process, on grids and after a resume.

That these functions have TRL's numbers, tests/train/methods/test_grpo.py shows.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import triax
from triax.data.dataloader import BatchOrder
from triax.data.prompts import Prompts, PromptTokenizer
from triax.train.file import read_training_file
from triax.train.methods import Rollouts, grpo_loss

from support.file_runs import numbers_of
from support.method_runs import FILE, RATE, WORDS, refusal_of, run, same_run, write_samples
from support.toy_answers import model_of, tokenizer
from support.trl_in_float64 import exact

STEPS, BATCH, GROUP = 6, 8, 4
FUNCTIONS = '''\
from letters import VOWELS


def vowels(completions, **columns):
    return [sum(letter in VOWELS for letter in text) / 3 for text in completions]


async def like(prompts, completions, wanted, trainer_state, **columns):
    """Letters of a word, one more in later steps."""
    return [sum(letter in word for letter in text) + (trainer_state.global_step > 1) for text, word in
            zip(completions, wanted)]
'''
METHOD = """\
method:
  name: grpo
  rewards: [scores.py:vowels, scores:like]
  reward_weights: [1.0, 0.5]
  kind: grpo
  beta: 0.2
  clip: 0.1
  clip_high: 0.14
  temperature: 0.9
  scale_rewards: batch
  group: 4
  max_new_tokens: 5
  steps_per_rollout: 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model whose answers vary, prompts, and reward functions."""
    root = tmp_path_factory.mktemp("grpo")
    with exact():
        model = model_of()
        for parameter in model.parameters():
            parameter.data *= 8 if parameter.dim() > 1 else 1
        model.save_pretrained(root / "first")
    tokenizer().save_pretrained(root / "first")
    prompts = [{"prompt": f"{a} {b} ", "wanted": b} for a, b in zip(WORDS, [*WORDS[1:], "the"])]
    file = (
        FILE.replace("method: {name: METHOD}\n", METHOD)
        .replace("size: 4", f"size: {BATCH}")
        .replace("sequence: 16", "sequence: 18")
    )
    write_samples(root, "grpo", [*prompts, {"prompt": "a prompt that is too long", "wanted": ""}], file)
    (root / "letters.py").write_text('VOWELS = "aeiou"\n')
    (root / "scores.py").write_text(FUNCTIONS)
    return root


def by_functions(root: str) -> tuple[list[float], list[dict[str, float]]]:
    """Train by triax's functions on one process; return losses, and metrics of the draws; save the weights."""
    os.chdir(root)
    scope: dict[str, Any] = {}
    exec(FUNCTIONS.replace("from letters import VOWELS", 'VOWELS = "aeiou"'), scope)
    grid = triax.Grid()
    options: Any = {"clip": 0.1, "clip_high": 0.14, "beta": 0.2, "temperature": 0.9}
    make = lambda: triax.PipelineModule(  # noqa: E731
        triax.load_hf("first"), grid=grid, loss_fn=grpo_loss(grid, 29, "grpo", **options), dtype=torch.float64
    )
    batch, sgd = triax.Batch(size=BATCH, microbatch=4), partial(torch.optim.SGD, lr=RATE)
    engine: Any = triax.Engine(make(), optimizer=sgd, batch=batch)
    sampler = triax.init_inference(engine, max_batch=3, tokenizer=PromptTokenizer("first"))
    functions = [scope["vowels"], scope["like"]]
    more: Any = {"weights": [1.0, 0.5], "scale_rewards": "batch", "group": GROUP, "max_new_tokens": 5}
    reference: Any = triax.Engine(make(), batch=batch)
    rollouts = Rollouts(engine, sampler, functions, reference=reference, **more)
    prompts = Prompts("grpo.jsonl", "first", 18 - 5)
    assert len(prompts) == 8 and prompts.left_out == 1
    losses, drawn = [], []
    order = BatchOrder(8, 4, 4, 0, 1, 0)
    for numbers in [*order, *order][: STEPS // 2]:
        asked, columns = prompts.take(numbers)
        data = rollouts(asked, **columns)
        drawn.append(rollouts.metrics)
        losses += [engine.train_batch(iter(data[at : at + 2])).item() for at in (0, 2)]
    triax.save_hf(engine, "by-functions")
    return losses, drawn


def test_grpo_runs_on_grids_equal_one_process(ranks: Any, place: Path) -> None:
    """pipe 2; then data 2 with ZeRO 1, stopped between the steps on a draw, and resumed on tensor 2."""
    ((losses, drawn),) = ranks(1, by_functions, str(place), timeout=300)
    assert len({round(loss, 6) for loss in losses}) == STEPS
    wanted = losses, place / "by-functions"
    same_run(ranks, place, "grpo", "a", *wanted, (2, "grid={pipe: 2}; batch.microbatch=4"))
    logged = numbers_of(place / "runs" / "a", "Train/Metrics/")
    for name in ("reward", "rewards/like/mean", "completions/mean_length", "frac_reward_zero_std"):
        assert [each[name] for each in logged if name in each] == pytest.approx([each[name] for each in drawn])
    assert sum("kl" in each for each in logged) == STEPS
    grid = "grid={data: 2}; zero=1; checkpoint.every=1"
    parts = (2, f"{grid}; training.steps=3; export=false"), (2, "grid.tensor=2; batch.microbatch=2")
    same_run(ranks, place, "grpo", "b", *wanted, *parts)


@pytest.mark.exhaustive
def test_grpo_runs_on_two_axes_equal_one_process(ranks: Any, place: Path) -> None:
    """pipe 2 x tensor 2; then data 2 x pipe 2 with ZeRO 1, stopped between the steps on a draw, resumed on tensor 2."""
    ((losses, _),) = ranks(1, by_functions, str(place), timeout=300)
    wanted = losses, place / "by-functions"
    same_run(ranks, place, "grpo", "e", *wanted, (4, "grid={pipe: 2, tensor: 2}; batch.microbatch=4"))
    grid = "grid={data: 2, pipe: 2}; schedule=zb-v; zero=1; checkpoint.every=1"
    parts = (4, f"{grid}; training.steps=3; export=false"), (2, "grid.tensor=2; batch.microbatch=2")
    same_run(ranks, place, "grpo", "f", *wanted, *parts)


def evaluated(root: str, *changes: str) -> list[dict[str, float]]:
    """Be a rank of a run with held-out prompts; return the numbers of its evaluations."""
    run(root, "grpo", "data.held_out=0.4", "evaluate={every: 2, best: true}", *changes)
    return numbers_of(Path("runs") / read_training_file("grpo.yaml", changes)[0].name, "Validation/")


def test_grpo_runs_report_the_reward_of_held_out_prompts(ranks: Any, place: Path) -> None:
    (wanted,) = ranks(1, evaluated, str(place), "name=c", "batch.size=4", "method.steps_per_rollout=1")
    assert len(wanted) == 3 and all(each["loss"] == -each["reward"] for each in wanted)
    assert len({each["reward"] for each in wanted}) > 1
    changes = ["name=d", "batch.size=4", "method.steps_per_rollout=1", "grid={data: 2, pipe: 2}"]
    found = ranks(4, evaluated, str(place), *changes)[0]
    assert [each["reward"] for each in found] == pytest.approx([each["reward"] for each in wanted])
    assert (place / "runs" / "d" / "best" / "config.json").is_file()
    # The weights of the evaluation are those of the run: the last one is that of the written model.
    (again,) = ranks(1, reward_of, str(place))
    assert again == pytest.approx(wanted[-1]["reward"])


def reward_of(root: str) -> float:
    """Mean reward on the held-out prompts by the written model."""
    os.chdir(root)
    grid, scope = triax.Grid(), dict[str, Any]()
    exec(FUNCTIONS.replace("from letters import VOWELS", 'VOWELS = "aeiou"'), scope)
    loss_fn = grpo_loss(grid, 29, temperature=0.9)
    module = triax.PipelineModule(triax.load_hf("runs/c/model"), grid=grid, loss_fn=loss_fn, dtype=torch.float64)
    engine: Any = triax.Engine(module, batch=triax.Batch(size=2, microbatch=2))
    sampler = triax.init_inference(engine, tokenizer=PromptTokenizer("first"))
    likes = lambda **each: [1.0] * len(each["prompts"])  # noqa: E731
    rollouts = Rollouts(
        engine, sampler, [scope["vowels"], scope["like"], likes], max_new_tokens=5, group=2, weights=[1.0, 0.5, 0.5]
    )  # the step is 0 here, for which like() gives one less
    _, held_out = Prompts("grpo.jsonl", "first", 18 - 5).split(0.4)
    prompts, columns = held_out.take(range(len(held_out)))
    return rollouts.evaluate(prompts, **columns)["reward"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["method=grpo"], "method: name is grpo, which needs rewards: give it"),
        (["method.rewards=scores"], "'scores' names no function: give file.py:function or module:function"),
        (
            ["method.rewards=nowhere.py:reward", "method.reward_weights=null"],
            "method.rewards: nowhere.py:reward cannot",
        ),
        (["method.reward_weights=[1.0]"], "reward_weights has 1 numbers for 2 functions of"),
        (["batch.size=5"], "is 10 answers, no multiple of method.group 4"),
        (["method.max_new_tokens=18"], "which leaves no room for a prompt in training.sequence 18"),
        (["grid={tensor: 2, sequence_parallel: true}"], "grid.sequence_parallel shares a row's tokens evenly"),
        (["training.spikes=rewind"], "method grpo would draw the same ones: write skip"),
        (["method.reference=nowhere"], "method.reference nowhere: "),
        (["method.level=word"], "method.level"),
        (["data=empty.jsonl"], "empty.jsonl, line 1: the columns are 'text', but 'prompt' is needed"),
        (["batch.size=24"], "data.training has 8 prompts, less than the 12 of a rollout"),
    ],
)
def test_grpo_runs_refuse_mistakes(
    place: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], message: str, capsys: Any
) -> None:
    monkeypatch.chdir(place)
    (place / "empty.jsonl").write_text('{"text": "a"}\n')
    assert message in refusal_of("grpo", changes, capsys)
