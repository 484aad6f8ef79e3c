"""Training files with ``method: reward``: TRL's RewardTrainer on one process, on grids and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from triax.base.errors import ConfigError
from triax.data.answers import Answers
from triax.data.dataloader import BatchOrder
from triax.train.file import read_training_file
from triax.train.start import make_job

from support.method_runs import BATCH, RATE, STEPS, WORDS, numbers_of, run, same_weights, write_model, write_samples
from support.toy_answers import SIZES, quiet, steps, tokenizer
from support.trl_in_float64 import exact

CENTER = 0.1
METHOD = f"method={{name: reward, center: {CENTER}}}"


def samples() -> list[dict[str, Any]]:
    pairs = [(f"{a} ", b, a) for a in WORDS for b in WORDS[:4] if a != b]
    return [
        {"prompt": p, "chosen": b, "rejected": w, "margin": 0.25 * (n % 3)}
        if n % 2
        else {"prompt": "", "chosen": p + b, "rejected": p + w, "margin": 0.25 * (n % 3)}
        for n, (p, b, w) in enumerate(pairs)
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
    order = [number for batch in BatchOrder(len(data), BATCH, BATCH, 0, 1, 0) for number in batch]
    options = steps(f"{root}/trl", BATCH, STEPS, RATE)
    args = trl.RewardConfig(max_length=None, center_rewards_coefficient=CENTER, **options)

    class InOrder(trl.RewardTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return order

    with exact():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(f"{root}/first", dtype=torch.float64)
        trainer = InOrder(model, args=args, train_dataset=data, processing_class=tokenizer())
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        trainer.save_model(f"{root}/trl-last")
        return [[row[name] for name in ("loss", "accuracy", "margin")] for row in trainer.state.log_history[:STEPS]]


def test_reward_runs_on_grids_have_trls_numbers(ranks: Any, place: Path) -> None:
    """pipe 2 x tensor 2, data 2 x pipe 2 with zb-v; then one process, resumed on context 2."""
    (rows,) = ranks(1, trl_run, str(place), timeout=300)
    losses = [row[0] for row in rows]
    last = load_file(place / "trl-last" / "model.safetensors")
    for name, *changes in (
        ("a", "grid={pipe: 2, tensor: 2}"),
        ("b", "grid={data: 2, pipe: 2}", "schedule=zb-v", "zero=1"),
    ):
        found = ranks(4, run, str(place), "reward", METHOD, f"name={name}", *changes)[0]
        assert found == pytest.approx(losses, rel=1e-10)
        same_weights(place / "runs" / name / "model", last)
        logged = numbers_of(place / "runs" / name, "Train/Metrics/")
        assert [[each["accuracy"], each["margin"]] for each in logged] == [pytest.approx(row[1:]) for row in rows]
    first = ranks(1, run, str(place), "reward", METHOD, "name=c", "training.time_limit=0.001s")[0]
    assert 0 < len(first) < STEPS
    rest = ranks(2, run, str(place), "reward", METHOD, "name=c", "grid.context=2", "batch.microbatch=2")[0]
    assert first + rest == pytest.approx(losses, rel=1e-10)
    same_weights(place / "runs" / "c" / "model", last)


def test_a_language_model_gets_a_head_and_is_evaluated(
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
    place: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], message: str
) -> None:
    monkeypatch.chdir(place)
    (place / "mixed.jsonl").write_text(
        '{"chosen": "ab", "rejected": "c", "margin": 1}\n{"chosen": "a", "rejected": "c"}'
    )
    with pytest.raises(ConfigError) as caught:
        make_job(read_training_file("reward.yaml", changes)[0])
    assert message in str(caught.value)
