"""Losses of methods and the functions that make their labels refuse mistakes, and say what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import triax
from triax import Grid
from triax.train.methods import (
    distill_loss,
    grpo_loss,
    kto_loss,
    preference_loss,
    reward_layers,
    reward_loss,
    with_teacher,
)

from support.toy_answers import SIZES
from support.toys import error_text

LOGITS, IDS = torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.long)
SCORES, LENGTHS = torch.zeros(2, 3), torch.tensor([1, 3])
KTO = {"labels": IDS, "baseline": torch.zeros(2)}
GRPO = {"labels": IDS, "advantages": torch.zeros(2), "old": SCORES, "reference": SCORES}
ALL_IDS = IDS[..., None].expand(2, 3, 8)
NUMBER = torch.zeros(3)
LLAMA = triax.LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)

WITH_TEACHER = "with k < 8: make the microbatches with triax.methods.with_teacher"


def grpo(**labels: Tensor) -> Any:
    return grpo_loss(Grid(), 8, beta=0.1)(LOGITS, GRPO | labels)


def distilled(**teacher: Tensor) -> Any:
    return distill_loss(Grid(), 8)(LOGITS, {"labels": IDS, **teacher})


Case = tuple[Callable[[], Any], str]
LOSSES: dict[str, list[Case]] = {
    "kto": [
        (lambda: kto_loss(Grid(), 8, beta=0), "beta is 0"),
        (lambda: kto_loss(Grid(), 8, undesirable_weight=-1), "undesirable_weight is -1"),
        (lambda: kto_loss(Grid(), 8)(LOGITS, {"labels": IDS}), "labels['baseline'], which is None: make each step's"),
        (
            lambda: kto_loss(Grid(), 8)(LOGITS, KTO | {"desirable": torch.zeros(2)}),
            "labels['desirable'], a torch.bool tensor of shape (2,)",
        ),
        (
            lambda: kto_loss(Grid(), 8)(LOGITS, KTO | {"desirable": torch.tensor([True, False])}),
            "labels['reference'], which is None: make the microbatches",
        ),
    ],
    "preference": [
        (lambda: preference_loss(Grid(), 8, "dop"), "there is no preference loss 'dop'"),  # type: ignore[arg-type]
        (lambda: preference_loss(Grid(), 8, beta=0), "beta is 0"),
        (lambda: preference_loss(Grid(), 8, margin=0.5), "dpo has no margin, but simpo has"),
        (lambda: preference_loss(Grid(), 8)(LOGITS, {"labels": IDS}), "labels['reference'], which is None: make the"),
        (
            lambda: preference_loss(Grid(), 8, "simpo")(LOGITS[:1], {"labels": IDS[:1]}),
            "has 1 rows, but pairs need an even number",
        ),
    ],
    "reward": [
        (lambda: reward_loss(Grid(), center=-1), "center is -1"),
        (lambda: reward_loss(Grid())(LOGITS, {"lengths": LENGTHS}), "scores of shape (2, 3, 8)"),
        (lambda: reward_loss(Grid())(SCORES, {}), "integers (2,), as labels['lengths'], which is None"),
        (
            lambda: reward_loss(Grid())(SCORES, {"lengths": torch.tensor([1, 4])}),
            "lengths of the rows are from 1 to 4, but the rows have 3 tokens",
        ),
        (
            lambda: reward_loss(Grid())(SCORES[:1], {"lengths": LENGTHS[:1]}),
            "has 1 rows, but pairs need an even number",
        ),
        (
            lambda: reward_loss(Grid())(SCORES, {"lengths": LENGTHS, "margin": torch.zeros(2)}),
            "margins have the shape (2,): give one for each of 1 pairs",
        ),
        (
            lambda: reward_layers(triax.llama_layers(LLAMA)[:-1]),
            "the last of the layers is FinalRMSNorm, but a reward model needs",
        ),
    ],
    "grpo": [
        (lambda: grpo_loss(Grid(), 8, "gspo"), "there is no policy loss 'gspo'"),  # type: ignore[arg-type]
        (lambda: grpo_loss(Grid(), 8, level="tokens"), "no level 'tokens'; did you mean 'token'"),  # type: ignore[arg-type]
        (lambda: grpo_loss(Grid(), 8, beta=-1), "beta is -1: give 0"),
        (lambda: grpo_loss(Grid(), 8, clip=1.2), "clip is 1.2 and clip_high 1.2: give a clip between 0 and 1"),
        (lambda: grpo_loss(Grid(), 8, "dr_grpo"), "give max_new_tokens, the most tokens of an answer"),
        (lambda: grpo_loss(Grid(), 8, max_new_tokens=3), "dapo divides by the tokens that there are"),
        (lambda: grpo_loss(Grid(), 8, temperature=0), "temperature=0: give a number above 0"),
        (lambda: grpo(old=NUMBER), "(2, 3), as labels['old'], which is a tensor of shape (3,)"),
        (lambda: grpo(reference=NUMBER), "(2, 3), as labels['reference'], which is a tensor of shape (3,)"),
        (lambda: grpo(advantages=NUMBER), "(2,), as labels['advantages'], which is a tensor of shape (3,)"),
    ],
    "distillation": [
        (lambda: distill_loss(Grid(), 8, "revers"), "there is no distillation loss 'revers'"),  # type: ignore[arg-type]
        (lambda: distill_loss(Grid(), 8, beta=0.5), "reverse has no beta, but jsd has"),
        (lambda: distill_loss(Grid(), 8, "jsd", beta=1), "such as 0.5: write kind='reverse'"),
        (lambda: distill_loss(Grid(), 8, temperature=0), "temperature is 0"),
        (lambda: distill_loss(Grid(), 8, hard=-1), "hard is -1"),
        (lambda: distill_loss(Grid(), 8)(LOGITS, IDS), "was given a Tensor as labels: give a dict with 'labels'"),
        (lambda: distilled(), "the teacher's part of the labels is nothing, but for labels"),
        (lambda: distilled(teacher=LOGITS[..., :4]), WITH_TEACHER),
        (lambda: distilled(teacher=LOGITS, teacher_ids=ALL_IDS), WITH_TEACHER),
        (lambda: distilled(teacher_ids=ALL_IDS), WITH_TEACHER),
        (
            lambda: distilled(teacher=LOGITS[..., :2], teacher_ids=ALL_IDS[..., :2]),
            "'teacher' of k words are no log-probabilities",
        ),
    ],
}


@pytest.mark.parametrize(
    ("call", "words"), [pytest.param(*case, id=f"{name}: {case[1]}") for name in LOSSES for case in LOSSES[name]]
)
def test_wrong_arguments_of_method_losses_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        call()


def test_models_that_give_no_reward_are_refused(tmp_path: Path) -> None:
    import transformers

    three = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES | {"num_labels": 3}))
    olmoe = triax.config_from_hf(transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SIZES, num_experts=8)))
    layers = reward_layers(triax.models.mixtral_layers(olmoe))  # type: ignore[arg-type]
    assert "has 3 scores, but triax's layers have one" in error_text(lambda: triax.load_hf(three))
    text = error_text(lambda: triax.save_hf(triax.PipelineModule(layers, grid=Grid()), tmp_path))
    assert "no class for reward models of model_type 'olmoe'" in text


def test_mistakes_of_with_teacher_are_refused() -> None:
    grid, other = Grid(), Grid()

    def engine(loss_fn: Any, grid: Grid = grid) -> Any:
        model = triax.PipelineModule(triax.llama_layers(LLAMA), grid=grid, loss_fn=loss_fn)
        return triax.Engine(model, batch=triax.Batch(size=1, microbatch=1))

    student = engine(distill_loss(grid, 8))
    for teacher, options, words in (
        (engine(triax.NextTokenLoss(grid, 8)), {}, "an engine of the teacher whose loss_fn is a NextTokenLoss: make"),
        (engine(distill_loss(grid, 9)), {}, "a vocabulary of 8, the teacher of 9"),
        (student, {"top_k": 8}, "top_k is 8: give a number from 1 to 7"),
        (student, {}, "was given 0 microbatches"),
        (engine(distill_loss(other, 8), other), {}, "the teacher has its own grid"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            with_teacher(student, teacher, [], **options)
