"""Training files with ``method: reward``: TRL's RewardTrainer on one process, on grids and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from triax.data.answers import Answers

from support.file_runs import numbers_of
from support.method_runs import (
    BATCH,
    PAIRS,
    RATE,
    STEPS,
    STOP,
    batches_of,
    refusal_of,
    run,
    same_run,
    write_model,
    write_samples,
)
from support.toy_answers import SIZES, in_order, quiet, run_of, steps, tokenizer
from support.trl_in_float64 import exact

CENTER = 0.1
METHOD = f"method={{name: reward, center: {CENTER}}}"


def samples() -> list[dict[str, Any]]:
    return [
        {"prompt": p, "chosen": b, "rejected": w, "margin": 0.25 * (n % 3)}
        if n % 2
        else {"prompt": "", "chosen": p + b, "rejected": p + w, "margin": 0.25 * (n % 3)}
        for n, (p, b, w) in enumerate(PAIRS)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a reward model, a language model, the tokenizer, and samples with margins."""
    import transformers

    root = tmp_path_factory.mktemp("reward")
    write_model(root / "language")
    write_model(root / "first")
    with exact():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES | {"initializer_range": 0.2, "num_labels": 1})
        transformers.LlamaForSequenceClassification(config).double().save_pretrained(root / "first")
    write_samples(root, "reward", [{k: v for k, v in each.items() if v != ""} for each in samples()])
    return root


def trl_run(root: str) -> list[list[float]]:
    """Train with TRL on one process, on the samples in triax's order; return losses, accuracies and margins."""
    quiet()
    import datasets
    import transformers
    import trl

    data = datasets.Dataset.from_list(samples())
    args = trl.RewardConfig(
        max_length=None, center_rewards_coefficient=CENTER, **steps(f"{root}/trl", BATCH, STEPS, RATE)
    )
    with exact():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(f"{root}/first", dtype=torch.float64)
        trainer = in_order(trl.RewardTrainer, [number for batch in batches_of(data) for number in batch])(
            model, args=args, train_dataset=data, processing_class=tokenizer()
        )
        rows = run_of(trainer, f"{root}/trl")[:STEPS]
        return [[row[name] for name in ("loss", "accuracy", "margin")] for row in rows]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_reward_runs_on_grids_equal_trl(ranks: Any, place: Path, every: bool) -> None:
    """data 2 x pipe 2 with zb-v; tensor 2, resumed on context 2; in the sweep pipe 2 x tensor 2, and one process."""
    (rows,) = ranks(1, trl_run, str(place), timeout=300)
    context = (2, f"{METHOD}; grid.context=2; batch.microbatch=2")
    some: list[tuple[str, *tuple[tuple[int, str], ...]]] = [
        ("b", (4, f"{METHOD}; grid={{data: 2, pipe: 2}}; schedule=zb-v; zero=1")),
        ("c", (2, f"{METHOD}; grid.tensor=2; {STOP}"), context),
    ]
    more: list[tuple[str, *tuple[tuple[int, str], ...]]] = [
        ("a", (4, f"{METHOD}; grid={{pipe: 2, tensor: 2}}")),
        ("d", (1, f"{METHOD}; {STOP}"), context),
    ]
    for name, *parts in more if every else some:
        same_run(ranks, place, "reward", name, [row[0] for row in rows], place / "trl" / "last", *parts)
        logged = numbers_of(place / "runs" / name, "Train/Metrics/")
        assert [[each["accuracy"], each["margin"]] for each in logged] == [pytest.approx(row[1:]) for row in rows]


def test_a_reward_run_evaluates_a_language_model_with_a_new_head(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    monkeypatch.chdir(place)
    changes = ["name=d", "model={folder: language}", "data.held_out=0.4", "evaluate.every=6"]
    run(str(place), "reward", *changes)
    shown = capsys.readouterr().out
    (found,) = numbers_of(place / "runs" / "d", "Validation/")
    assert f"loss    {found['loss']:.4f} nats per pair on held-out samples" in shown
    assert f"accuracy {found['accuracy']:.4f}  margin {found['margin']:.4f}" in shown
    data = Answers("reward.jsonl", "scored", "language", 16)
    _, held_out = data.split(0.4)
    ids, labels = data.collate([held_out[at] for at in range(8)])
    with exact(), torch.no_grad():
        model = transformers.AutoModelForSequenceClassification.from_pretrained("runs/d/model", dtype=torch.float64)
        assert type(model) is transformers.LlamaForSequenceClassification
        mask = torch.arange(ids.shape[1]) < labels["lengths"][:, None]
        better, worse = model(input_ids=ids, attention_mask=mask).logits[:, 0].chunk(2)
        loss = -torch.nn.functional.logsigmoid(better - worse - labels["margin"]).mean()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-10)
    assert found["margin"] == pytest.approx((better - worse).mean().item(), rel=1e-10)
    assert found["accuracy"] == (better > worse).double().mean().item()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["sample={prompt: a}"], "sample has no effect on a reward model"),
        (["method=sft", "data=reward.jsonl"], "model.folder first is a reward model"),
        (["method={name: reward, beta: 1}"], "method: beta belongs to"),
        (["data=mixed.jsonl"], "mixed.jsonl, line 2: there is no 'margin', but other pairs have one"),
        (["training.sequence=4"], "there is no sample in reward.jsonl"),
    ],
)
def test_reward_runs_refuse_mistakes(
    place: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], message: str, capsys: Any
) -> None:
    monkeypatch.chdir(place)
    (place / "mixed.jsonl").write_text(
        '{"chosen": "ab", "rejected": "c", "margin": 1}\n{"chosen": "a", "rejected": "c"}'
    )
    assert message in refusal_of("reward", changes, capsys)
