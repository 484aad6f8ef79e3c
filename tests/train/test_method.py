"""Training files with a ``method``: TRL's trainers on one process, and the equations, on grids and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
from support.method_steps import descend, label_log_probs
from support.toy_answers import in_order, model_of, quiet, run_of, steps, tokenizer
from support.trl_in_float64 import exact


def samples(method: str) -> list[dict[str, Any]]:
    if method == "kto":
        return [{"prompt": p, "completion": b, "label": n % 3 == 0} for n, (p, b, _) in enumerate(PAIRS)]
    if method == "sft":
        return [{"prompt": p, "completion": b} for p, b, _ in PAIRS]
    return [{"prompt": p, "chosen": b, "rejected": w} for p, b, w in PAIRS]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, its tokenizer, and a file of samples of each method."""
    root = tmp_path_factory.mktemp("methods")
    write_model(root / "first")
    for method in ("dpo", "kto", "sft"):
        write_samples(root, method, samples(method))
    return root


def trl_run(root: str, method: str) -> list[float]:
    """Train with TRL on one process, on the samples in triax's order; return the losses, and save the weights."""
    quiet()
    import datasets
    import trl

    data = datasets.Dataset.from_list(samples(method))
    options = steps(f"{root}/{method}", BATCH, STEPS, RATE)
    kind: Any = trl.DPOTrainer if method == "dpo" else trl.SFTTrainer
    args: Any = trl.DPOConfig(beta=0.1, **options) if method == "dpo" else trl.SFTConfig(max_length=None, **options)
    with exact():
        more = {"ref_model": model_of()} if method == "dpo" else {}
        trainer = in_order(kind, [number for batch in batches_of(data) for number in batch])(
            model_of(), args=args, train_dataset=data, processing_class=tokenizer(), **more
        )
        return [row["loss"] for row in run_of(trainer, f"{root}/{method}")][:STEPS]


def kto_run(root: str, method: str) -> list[float]:
    """Train by KTO's equation in plain PyTorch on one process; return the losses, and save the weights."""
    with exact():
        model, reference = model_of(), model_of()
        data = Answers(f"{root}/kto.jsonl", "unpaired", f"{root}/first", 16)
        losses = []
        for numbers in batches_of(data):
            (ids, labels), (other, others) = data.collate(numbers), data.mismatched(numbers)

            def log_probs(model: Any, ids: Tensor, labels: dict[str, Tensor]) -> Tensor:
                return label_log_probs(model, ids, labels["labels"]).sum(1)

            with torch.no_grad():
                moved = log_probs(model, other, others) - log_probs(reference, other, others)
                known = log_probs(reference, ids, labels)
            baseline = moved.mean().clamp(min=0)
            ratio = log_probs(model, ids, labels) - known
            good = torch.tensor([samples("kto")[number]["label"] for number in numbers])
            signed = torch.where(good, ratio - baseline, baseline - ratio)
            losses.append(descend(model, (1 - torch.sigmoid(0.1 * signed)).mean(), RATE))
        model.save_pretrained(f"{root}/kto/last")
    return losses


@pytest.mark.parametrize(
    ("method", "reference", "schedule"),
    [("dpo", trl_run, "1f1b"), ("sft", trl_run, "1f1b"), ("kto", kto_run, "zb-h1")],
    ids=["dpo", "sft", "kto"],
)
def test_dpo_sft_and_kto_runs_on_grids_equal_the_reference(
    ranks: Any, place: Path, method: str, reference: Any, schedule: str
) -> None:
    """pipe 2 x tensor 2; then data 2 with ZeRO 2, stopped after a step and resumed on context 2."""
    (losses,) = ranks(1, reference, str(place), method, timeout=300)
    wanted, grid = (losses, place / method / "last"), "grid={pipe: 2, tensor: 2}; batch.microbatch=2"
    same_run(ranks, place, method, f"a-{method}", *wanted, (4, f"{grid}; schedule={schedule}"))
    parts = (2, f"zero=2; {STOP}"), (2, "grid.context=2; batch.microbatch=2")
    same_run(ranks, place, method, f"b-{method}", *wanted, *parts)


def test_held_out_samples_are_evaluated_and_never_trained_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    run(str(place), "dpo", "name=e", "data.held_out=0.3", "evaluate.every=3")
    (shown,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("loss ")]
    losses = [row["loss"] for row in numbers_of(place / "runs" / "e", "Validation/")]
    assert len(losses) == 2 and shown == f"loss    {losses[-1]:.4f} nats per pair on held-out samples"
    data = Answers("dpo.jsonl", "pairs", "first", 16)
    training, held_out = data.split(0.3)
    assert len(held_out) == 8 and not {*map(held_out.__getitem__, range(8))} & {*map(training.__getitem__, range(20))}
    # The loss by transformers of the 2 batches, by the weights before and after.
    import transformers

    with exact():
        models = [
            transformers.LlamaForCausalLM.from_pretrained(f, dtype=torch.float64) for f in ("runs/e/model", "first")
        ]
        ids, labels = data.collate([held_out[at] for at in range(8)])
        with torch.no_grad():
            rows_of = [label_log_probs(model, ids, labels["labels"]).sum(1) for model in models]
        better, worse = (rows_of[0] - rows_of[1]).chunk(2)
        loss = -torch.nn.functional.logsigmoid(0.1 * (better - worse)).mean()
    assert losses[-1] == pytest.approx(float(loss), rel=1e-10)


def test_the_loss_of_held_out_answers_is_a_mean_over_tokens(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two batches have different numbers of tokens."""
    import transformers

    monkeypatch.chdir(place)
    run(str(place), "sft", "name=h", "data.held_out=0.4", "evaluate.every=6")
    (found,) = [row["loss"] for row in numbers_of(place / "runs" / "h", "Validation/")]
    data = Answers("sft.jsonl", "sft", "first", 16)
    _, held_out = data.split(0.4)
    ids, labels = data.collate([held_out[at] for at in range(8)])
    counts = [int((part >= 0).sum()) for part in labels.chunk(2)]
    assert counts[0] != counts[1]
    with exact(), torch.no_grad():
        model = transformers.LlamaForCausalLM.from_pretrained("runs/h/model", dtype=torch.float64)
        logits = model(input_ids=ids).logits
        wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert found == pytest.approx(float(wanted), rel=1e-10)


def test_a_resumed_dpo_run_needs_its_reference_file(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    run(str(place), "dpo", "name=f", STOP)
    (file,) = (place / "runs" / "f").glob("reference-*.safetensors")
    file.unlink()
    with pytest.raises(SystemExit):
        run(str(place), "dpo", "name=f")
    text = capsys.readouterr().err
    place_of = file.relative_to(place)
    assert f", but the reference model's log-probabilities of its data, {place_of}, are missing" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["method.beta=0"], "method.beta"),
        (["method.name=ppo"], "method.name"),
        (
            ["method={name: sft, beta: 1}"],
            "beta belongs to dpo, ipo, simpo, orpo, kto, distill, grpo, and name is sft",
        ),
        (["method={name: dpo, margin: 1}"], "method: margin belongs to simpo, and name is dpo"),
        (["data.packing=whole"], "data.packing has no effect with a method"),
        (["data.training={dpo.jsonl: 1.0}"], "a mixture by weights needs folders of tokens"),
        (["model={preset: bytes-tiny}"], "tokenizer is missing"),
        (["tokenizer=bytes"], "tokenizer bytes has 256 tokens, but the model's vocab_size is 29"),
        (
            ["data.training=kto.jsonl"],
            "kto.jsonl, line 1: the columns are 'prompt', 'completion', 'label', but 'chosen'",
        ),
        (["data.held_out=0.1", "batch.size=8"], "evaluate has 3 held-out samples, less than a batch of 8"),
    ],
)
def test_dpo_runs_refuse_mistakes(
    place: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], message: str, capsys: Any
) -> None:
    monkeypatch.chdir(place)
    assert message in refusal_of("dpo", changes, capsys)
