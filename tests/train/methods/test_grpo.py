"""GRPO on grids beside TRL's GRPOTrainer and the papers' equations in plain PyTorch: answers, losses, metrics, weights.

triax draws the answers on each grid; TRL trains on the same ones.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import triax
from triax import Grid
from triax.context.order import gather, shard
from triax.train.methods import Rollouts, grpo_loss

from support.method_steps import GRIDS, QUICK, Place, engine_at, same_weights
from support.toy_answers import LETTERS, SIZES, quiet, run_of, steps, tokenizer
from support.trl_in_float64 import exact

GENERATIONS, ITERATIONS, GROUP, PROMPTS, NEW = 3, 3, 4, 2, 6
SEED = 19
END = LETTERS["_"]
# No padding index, whose embedding transformers would not train: the model may draw any letter.
NO_PADDING = SIZES | {"pad_token_id": None}
WORDS = ["the", "fox", "quick", "brown", "over", "lazy"]  # neighbors of one length: TRL pads others on the left
WEIGHTS = [1.0, 0.5]


class Letters:
    """Tokenizer of single letters."""

    eos_token_id = END

    def encode(self, text: str) -> list[int]:
        return [LETTERS[letter] for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(list(LETTERS)[number] for number in ids)


def vowels(completions: list[str], **_: Any) -> list[float | None]:
    return [sum(letter in "aeiou" for letter in text) / 3 for text in completions]


def like(prompts: list[str], completion_ids: list[list[int]], wanted: list[str], **_: Any) -> list[float | None]:
    """Letters of a word; answers that begin with a letter behind p are not judged."""
    assert len(prompts) == len(completion_ids) == len(wanted)
    count = lambda ids, word: sum(number in map(LETTERS.get, word) for number in ids)  # noqa: E731
    return [None if ids[0] > LETTERS["p"] else count(ids, word) for ids, word in zip(completion_ids, wanted)]


class Case(NamedTuple):
    """One method: the options of ``grpo_loss`` beside those of TRL."""

    kind: Any
    loss: dict[str, Any]
    theirs: dict[str, Any]
    rate: float
    scale: Any = "group"
    temperature: float = 1.0


CASES = {
    "dapo": Case(
        "dapo",
        {"clip": 0.1, "clip_high": 0.14, "temperature": 0.8},
        {"epsilon": 0.1, "epsilon_high": 0.14, "temperature": 0.8},
        0.5,
        temperature=0.8,
    ),
    "grpo": Case("grpo", {"beta": 0.2}, {"beta": 0.2}, 0.5, "batch"),
    "grpo's paper": Case(
        "grpo", {"beta": 0.2, "correct_kl": False}, {"beta": 0.2, "use_bias_correction_kl": False}, 0.5
    ),
    "gspo": Case(
        "grpo",
        {"level": "sequence", "clip": 0.02, "beta": 0.1},
        {"importance_sampling_level": "sequence", "epsilon": 0.02, "beta": 0.1},
        0.2,
    ),
    "dr_grpo": Case("dr_grpo", {"max_new_tokens": NEW}, {}, 0.5, "none"),
}
SHARED: tuple[str, ...] = (
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/min_length",
)
SHARED += tuple(f"rewards/{name}/{what}" for name in ("vowels", "like") for what in ("mean", "std"))


def first_model(folder: str) -> None:
    """Save a model whose answers vary."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**NO_PADDING)).double()
    for parameter in model.parameters():
        parameter.data *= 8 if parameter.dim() > 1 else 1
    model.save_pretrained(f"{folder}/first")


def prompts_of(generation: int) -> list[str]:
    return [f"{WORDS[(PROMPTS * generation + index) % len(WORDS)]} " for index in range(PROMPTS)]


def trl_steps(folder: str, name: str, sequences: list[list[list[int]]]) -> list[dict[str, float]]:
    """Train with TRL on one process on answers that were drawn; return its log, and save the weights."""
    quiet()
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    case, calls = CASES[name], iter(range(len(sequences)))

    def given(prompts: list[str], trainer: Any) -> dict[str, Any]:
        generation = next(calls)
        assert prompts == [prompt for prompt in prompts_of(generation) for _ in range(GROUP)]
        ids = [Letters().encode(prompt) for prompt in prompts]
        answers = [whole[len(prompt) :] for whole, prompt in zip(sequences[generation], ids, strict=True)]
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None}

    args = GRPOConfig(
        num_generations=GROUP,
        num_iterations=ITERATIONS,
        max_completion_length=NEW,
        reward_weights=WEIGHTS,
        scale_rewards=case.scale,
        loss_type=case.kind,
        **case.theirs,
        shuffle_dataset=False,
        **steps(folder, PROMPTS * GROUP, len(sequences) * ITERATIONS, case.rate),
    )
    rows = [prompt for generation in range(len(sequences)) for prompt in prompts_of(generation)]
    with exact():
        model = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/first", dtype=torch.float64)
        data = datasets.Dataset.from_list([{"prompt": prompt, "wanted": prompt} for prompt in rows])
        trainer = GRPOTrainer(
            model, [vowels, like], args=args, train_dataset=data, processing_class=tokenizer(), rollout_func=given
        )
        return run_of(trainer, folder)


class Run(NamedTuple):
    """What a run of triax gave: for each step the loss and the metrics, and for each generation the rest."""

    losses: list[float]
    metrics: list[dict[str, float]]
    sequences: list[list[list[int]]]
    errors: list[float]  # largest error of the recorded log-probabilities


def trained(folder: str, name: str, place: Place) -> Run:
    """Train with triax on a grid with the model of a folder, and save the weights."""
    grid, case = Grid(**place.axes, timeout=60), CASES[name]
    sizes = PROMPTS * GROUP, 2 if place.schedule == "zb-v" else 4
    loss = partial(grpo_loss, grid, len(LETTERS), case.kind, chunk_tokens=12, **case.loss)
    engine = engine_at(place, grid, f"{folder}/first", loss(), *sizes, case.rate)
    reference = engine_at(place, grid, f"{folder}/first", loss(), *sizes, None) if case.loss.get("beta") else None
    rollouts = Rollouts(
        engine,
        triax.init_inference(engine, max_batch=3, tokenizer=Letters()),
        [vowels, like],
        group=GROUP,
        max_new_tokens=NEW,
        weights=WEIGHTS,
        scale_rewards=case.scale,
        reference=reference,
        seed=SEED,
    )
    run = Run([], [], [], [])
    for generation in range(GENERATIONS):
        prompts = prompts_of(generation)
        data = rollouts(prompts, wanted=prompts)
        run.sequences.append([each.tokens for each in rollouts.completions])
        for iteration in range(ITERATIONS):
            run.losses.append(engine.train_batch(iter(data)).item())
            run.metrics.append(engine.metrics | (rollouts.metrics if not iteration else {}))
            if not iteration:
                run.errors.append(rollouts.largest_difference())
        rollouts.largest_difference()
    triax.save_hf(engine, f"{folder}/triax")
    return run


SWEEP = [pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES if name != "dapo"]


@pytest.mark.parametrize("name", ["dapo", *SWEEP])
def test_grpo_losses_metrics_and_weights_equal_trl(ranks: Any, tmp_path: Path, name: str) -> None:
    """The runs are on one process and on grids."""
    folder = tmp_path
    first_model(str(folder))
    (run,) = ranks(1, trained, str(folder), name, Place({}), timeout=120)
    (theirs,) = ranks(1, trl_steps, str(folder), name, run.sequences, timeout=300)
    (folder / "log.json").write_text(json.dumps(theirs))
    for place in [None, *(QUICK if name == "dapo" else GRIDS)]:
        everyone = [run] if place is None else ranks(place.ranks, trained, str(folder), name, place)
        for found in everyone:
            assert found.sequences == run.sequences and found.losses == everyone[0].losses
            assert repr(found.metrics) == repr(everyone[0].metrics)  # of one answer the deviation is nan
        same_weights(folder / "triax", folder / "last")
        assert max(everyone[0].errors) < 1e-10
        for own, row, loss in zip(everyone[0].metrics, theirs, everyone[0].losses, strict=True):
            assert loss == pytest.approx(row["loss"], abs=1e-10)
            for metric, value in own.items():
                if metric in row and (metric.startswith(("clip_ratio", "kl")) or metric in SHARED):
                    wanted = math.nan if row[metric] is None else row[metric]  # of one answer there is no deviation
                    assert value == pytest.approx(wanted, abs=1e-10, nan_ok=True), metric
    clipped = [row["clip_ratio/region_mean"] for row in theirs]
    assert max(clipped) > 0 and min(clipped) == 0  # some steps clip
    assert {*SHARED} <= {*run.metrics[0]} & {*theirs[0]}
    assert run.metrics[0]["completions/min_length"] < NEW == run.metrics[0]["completions/max_length"]


# ------------------------------------------------------------------------------------------------ the papers' equations


def plain(logits: Tensor, data: dict[str, Any], kind: str, level: str, beta: float, right: bool) -> Tensor:
    """The papers' equations, answer by answer, token by token; at a temperature of 0.7."""
    answers, tokens = [], 0
    for row, advantage in enumerate(data["advantages"]):
        here = [at for at, label in enumerate(data["labels"][row]) if label != -100]
        logs = torch.stack([(logits[row, at] / 0.7).log_softmax(0)[data["labels"][row, at]] for at in here])
        old, reference = data["old"][row, here], data["reference"][row, here]
        ratios = (logs - old).exp()
        if level == "sequence":
            ratios = (logs.exp().prod() / old.exp().prod()) ** (1 / len(here))
            ratios = ratios.expand(len(here))
        losses = -torch.minimum(ratios * advantage, ratios.clamp(0.9, 1.15) * advantage)
        kl = reference.exp() / logs.exp() - (reference - logs) - 1
        answers.append(losses + beta * kl * (ratios if right else 1))
        tokens += len(here)
    if kind == "dapo":
        return sum(each.sum() for each in answers) / tokens
    mean = [each.sum() / 11 if kind == "dr_grpo" else each.mean() for each in answers]
    return torch.stack(mean).mean()


def labels_of(rows: int, length: int) -> dict[str, Any]:
    """Labels of answers of several lengths, drawn by a policy near by."""
    labels = torch.randint(0, 7, (rows, length))
    for row in range(rows):
        labels[row, : row % 3 + 1] = -100
        labels[row, length - row % 2 :] = -100
    near = {name: torch.randn(rows, length).double() * 0.3 - 2 for name in ("old", "reference")}
    return {"labels": labels, "advantages": torch.randn(rows).double(), **near}


@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_grpo_losses_and_gradients_follow_the_equations(kind: Any, level: Any) -> None:
    torch.manual_seed(1)
    data = labels_of(6, 8)
    for beta, right in ((0.0, True), (0.3, True), (0.3, False)):
        length = 11 if kind == "dr_grpo" else None
        options = {"clip": 0.1, "clip_high": 0.15, "level": level, "correct_kl": right, "temperature": 0.7}
        loss_fn = grpo_loss(Grid(), 7, kind, beta, max_new_tokens=length, **options)
        logits = torch.randn(6, 8, 7, dtype=torch.float64, requires_grad=True)
        loss = loss_fn(logits, data)
        total, weight = loss.terms[kind]
        assert weight == loss_fn.weight(data)[kind]
        wanted = plain(logits, data, kind, level, beta, right)
        found = torch.autograd.grad(total / weight, logits)[0]
        torch.testing.assert_close(total / weight, wanted, rtol=0, atol=1e-10)
        torch.testing.assert_close(found, torch.autograd.grad(wanted, logits)[0], rtol=0, atol=1e-10)
        clipped, count = loss.metrics["clip_ratio/region_mean"]
        assert 0 < clipped / count < 1 and ("kl" in loss.metrics) == (beta > 0)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_nan_at_ignored_labels_changes_no_grpo_loss(value: float) -> None:
    """Such values made the loss NaN, because NaN times 0 is NaN."""
    torch.manual_seed(2)
    data, found = labels_of(6, 8), []
    aside = data["labels"] == -100
    assert aside.any()
    for filled in (data, data | {name: data[name].masked_fill(aside, value) for name in ("old", "reference")}):
        logits = torch.randn(6, 8, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
        total, weight = grpo_loss(Grid(), 7, "grpo", 0.3)(logits, filled).terms["grpo"]
        found.append((total.detach(), torch.autograd.grad(total / weight, logits)[0]))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def in_parts(data: dict[str, Any], logits: Tensor, level: Any) -> tuple[float, Tensor, float]:
    """The loss, the gradient of this rank's logits and the share of clipped tokens, of a sequence in parts."""
    grid = Grid(context=2)
    loss = grpo_loss(grid, 7, "grpo", 0.3, 0.1, 0.15, level, temperature=0.7)
    mine = shard(logits, grid.context).requires_grad_()
    named = loss(mine, data)
    total, weight = named.terms["grpo"]
    clipped, count = named.metrics["clip_ratio/region_mean"]
    sums = torch.stack([torch.as_tensor(each).double().detach() for each in (total, weight, clipped, count)])
    assert weight == loss.weight(data)["grpo"]
    grid.context.all_reduce(sums)
    (gradient,) = torch.autograd.grad(total / sums[1], mine)
    return (sums[0] / sums[1]).item(), gather(gradient, grid.context, logits.shape[1]), (sums[2] / sums[3]).item()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_grpo_on_a_context_axis_has_the_loss_of_whole_sequences(ranks: Any, level: Any) -> None:
    torch.manual_seed(2)
    data, logits = labels_of(6, 8), torch.randn(6, 8, 7, dtype=torch.float64, requires_grad=True)
    wanted = plain(logits, data, "grpo", level, 0.3, right=True)
    (gradient,) = torch.autograd.grad(wanted, logits)
    whole = grpo_loss(Grid(), 7, "grpo", 0.3, 0.1, 0.15, level, temperature=0.7)(logits, data)
    clipped, count = whole.metrics["clip_ratio/region_mean"]
    for loss, found, share in ranks(2, in_parts, data, logits.detach(), level):
        assert loss == pytest.approx(wanted.item(), abs=1e-10) and share == pytest.approx(float(clipped / count))
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-10)
